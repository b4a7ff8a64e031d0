"""A process is killed in mid-training: torchrun starts all again, and they end where an undisturbed run ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.distributed.processes import in_processes
from tests.distributed.restartable import RUNS, run

SCRIPT = Path(__file__).with_name("restartable.py")


def _torchrun(folder: Path, kill_at: int) -> dict:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--monitor-interval=0.2", str(SCRIPT), str(folder), str(kill_at)]
    source = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    # By default an attempt shares the store of the one before it, and gloo may read an address of the dead there.
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "outcome.pt", weights_only=True)


@pytest.mark.distributed
@pytest.mark.slow
def test_killed_runs_resume_from_their_last_checkpoints_and_end_as_undisturbed_ones(tmp_path):
    undisturbed = in_processes(2, tmp_path / "undisturbed", run, tmp_path / "undisturbed")[0]
    killed = _torchrun(tmp_path / "killed", kill_at=27)
    assert killed.keys() == undisturbed.keys() and len(killed) == len(RUNS)
    for name, outcome in killed.items():
        assert (undisturbed[name].pop("start"), outcome.pop("start")) == (0, 20)
        torch.testing.assert_close(outcome, undisturbed[name], rtol=0, atol=0)
