"""A process is killed in mid-training: torchrun starts all again, and they end where an undisturbed run ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.distributed.processes import in_processes
from tests.distributed.restartable import run

SCRIPT = Path(__file__).with_name("restartable.py")


def _torchrun(folder: Path, rule: str, wrapper: str, kill_at: int) -> dict:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--monitor-interval=0.2", str(SCRIPT), str(folder), rule, wrapper, str(kill_at)]
    source = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    # By default an attempt shares the store of the one before it, and gloo may read an address of the dead there.
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "outcome.pt", weights_only=True)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("rule, wrapper", [("rate", "ddp"), ("kronecker", "fsdp")])
def test_a_killed_run_resumes_from_its_last_checkpoint_and_ends_as_an_undisturbed_one(rule, wrapper, tmp_path):
    undisturbed = in_processes(2, tmp_path / "undisturbed", run, tmp_path / "undisturbed", rule, wrapper)[0]
    killed = _torchrun(tmp_path / "killed", rule, wrapper, kill_at=27)
    assert (undisturbed.pop("start"), killed.pop("start")) == (0, 20)
    torch.testing.assert_close(killed, undisturbed, rtol=0, atol=0)
