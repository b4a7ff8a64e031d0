"""A sweep that was killed or interrupted, then the same command: no trial is lost, none is doubled."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.experiments.sweep import tiny
from tests.experiments.sweep.test_sweep import begun, trials
from tests.programs import Program

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")]


def start(folder, *options, pause=0.0):
    environment = {"TINY_LOG": str(folder / "log"), "TINY_PAUSE": str(pause)}
    return Program("tests.experiments.sweep.command", folder, *options, environment=environment)


def rows(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def wait_for_lines(path, count, process):
    """Wait until so many steps of training are in the log."""
    deadline = time.monotonic() + 120
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "nothing was trained"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return rows(start(tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize("lines", [1, 14])
def test_kill_9_in_the_middle_then_the_same_command(tmp_path, whole, lines):
    process = start(tmp_path, pause=0.05)
    wait_for_lines(tmp_path / "log", lines, process)
    process.kill()
    process.communicate()
    done, running = trials(tmp_path), trials(tmp_path, "RUNNING")
    assert len(running) <= 1 and len(done) < 6
    assert rows(start(tmp_path)) == whole  # at once: the default patience of ten minutes would not pass this test
    assert sorted(trial.params["lr"] for trial in trials(tmp_path)) == list(tiny.RATES)
    assert not trials(tmp_path, "RUNNING") and len(trials(tmp_path, "FAIL")) == len(running)
    repeated = {rate for rate, count in begun(tmp_path / "log").items() if count > 1}
    assert repeated <= {trial.params["lr"] for trial in running}


def test_ctrl_c_then_the_same_command(tmp_path, whole):
    process = start(tmp_path, pause=0.1)
    wait_for_lines(tmp_path / "log", 14, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0 and not trials(tmp_path, "RUNNING")
    assert rows(start(tmp_path)) == whole
    assert len(trials(tmp_path)) == 6
    # A run that is interrupted continues from its checkpoint, so no step is taken twice; the diverged run stops early.
    steps = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("step")]
    assert {rate: steps.count(f"step {rate}") for rate in tiny.RATES[:-1]} == dict.fromkeys(tiny.RATES[:-1], 8)


def test_two_jobs_share_the_work(tmp_path, whole):
    process = start(tmp_path, "--jobs", "2", pause=0.1)
    assert rows(process) == whole
    assert begun(tmp_path / "log") == dict.fromkeys(tiny.RATES, 1)
    workers = {trial.user_attrs["worker"]["name"] for trial in trials(tmp_path)}
    assert len(workers) == 2
    assert not list((tmp_path / "sweeps").glob("worker-*"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_jobs_end_with_their_parent_and_the_same_command_goes_on(tmp_path, whole, number):
    process = start(tmp_path, "--jobs", "2", pause=0.1)
    wait_for_lines(tmp_path / "log", 8, process)
    process.send_signal(number)
    process.communicate(timeout=60)  # returns once the jobs have ended, too: they hold its standard error
    assert process.returncode != 0 and len(trials(tmp_path)) < 6
    assert rows(start(tmp_path)) == whole
    assert len(trials(tmp_path)) == 6
    steps = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("step")]
    assert {rate: steps.count(f"step {rate}") for rate in tiny.RATES[:-1]} == dict.fromkeys(tiny.RATES[:-1], 8)


def test_a_job_that_is_killed_is_replaced_by_the_others(tmp_path, whole):
    process = start(tmp_path, "--jobs", "2", pause=0.1)
    wait_for_lines(tmp_path / "log", 8, process)
    while len(begun(tmp_path / "log")) < 2:  # on a busy machine one job may start much later than the other
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        pytest.skip("needs Linux to find the jobs")
    jobs = [int(pid) for pid in children.read_text().split() if _is_worker(int(pid))]
    os.kill(jobs[0], signal.SIGKILL)
    assert rows(process) == whole
    failed = [trial for trial in trials(tmp_path, "FAIL") if "withdrawn" not in trial.user_attrs]
    assert len(trials(tmp_path)) == 6 and len(failed) == 1


def _is_worker(pid):
    return "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
