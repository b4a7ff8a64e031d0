"""`apo run --jobs`: runs side by side in processes of their own."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.programs import Program

from apo_experiments import records

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")]


def start(*words, pause=0.0):
    environment = {"PAUSE": str(pause), "VICTIM": "victim"}
    words = ("run", "little-mlp", "--scale", "smoke", *words)
    return Program("tests.experiments.cli.command", *words, environment=environment)


def finish(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def values(folder):
    return {
        (r.config.label, r.config.seed): (r.config.hyper["lr"], r.summary["metrics"]["test_loss"])
        for r in records.find(Path(folder))
        if r.finished
    }


def test_a_process_that_is_killed_takes_its_own_run_along_and_no_other_and_the_same_command_makes_up_for_it(apo):
    assert apo("run", "little-mlp", "--scale", "smoke", "--runs", "in-turn", "--seeds", "2").code == 0
    Path("victim").touch()
    words = ("--jobs", "2", "--seeds", "2", "--json", "summary.json")
    code, _, err = finish(start(*words))
    assert code == 1 and err.count("failed with its process died (exit code -9)") == 1, err
    assert len(values("runs")) == 3
    code, out, err = finish(start(*words))
    assert code == 0 and err.count("finished before") == 3, err
    assert values("runs") == values("in-turn")
    assert len(json.loads(Path("summary.json").read_text())) == 4
    assert "/4] little-mlp SGD" in err and "little-mlp (Table 7)" in out


@pytest.mark.parametrize("how", ["signal", "time limit"])
def test_all_runs_stop_with_a_checkpoint(how):
    # Long enough for both to start on a busy machine, and too short for the 24 s of a run.
    process = start("--jobs", "2", *(["--time-limit", "16"] if how == "time limit" else []), pause=4)
    if how == "signal":
        for _ in range(2):  # both: on a busy machine one may start much later than the other
            next(line for line in process.stderr if "started" in line)
        time.sleep(1)  # past the beginning, where there is nothing to save yet
        process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == (130 if how == "signal" else 3), err
    assert "0 of 2 runs are finished" in err and "Continue with: apo run little-mlp" in err
    assert err.count("run the same command to resume") == len(list(Path("runs").rglob("checkpoint.pt"))) > 0
