"""Lightning, Accelerate and the Hugging Face Trainer with two processes train as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.in_frameworks import plain, trainer

for framework in ("lightning", "accelerate", "transformers"):
    pytest.importorskip(framework)

pytestmark = [pytest.mark.distributed, pytest.mark.integrations, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("in_frameworks.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """Returns what each of two processes found, by framework: one start for all, because importing them takes long."""
    folder = tmp_path_factory.mktemp("frameworks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    source = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(folder)], env=environment, cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"outcome-{rank}.pt", weights_only=True) for rank in range(2)]


def _check(found: list[dict[str, Any]], framework: str, expected: dict[str, Any]) -> None:
    assert len(expected["rates"]) > 3
    for results in found:
        torch.testing.assert_close(results[framework]["weights"], expected["weights"], rtol=0, atol=1e-5)
        for name in ("rates", "losses"):
            assert results[framework][name] == pytest.approx(expected[name], rel=1e-4)
    assert found[0][framework]["rates"] == found[1][framework]["rates"]


@pytest.mark.parametrize("form", ["callback", "one line"])
def test_lightning_under_ddp_ends_with_the_weights_of_one_process(found, form):
    _check(found, f"lightning, {form}", plain())


def test_accelerate_with_two_processes_and_accumulation_ends_with_the_weights_of_one(found):
    _check(found, "accelerate, after prepare", plain(accumulate=2))


def test_accelerate_attached_before_the_network_is_wrapped_ends_with_the_weights_of_one_process(found):
    _check(found, "accelerate, before prepare", plain())


def test_trainer_under_torchrun_ends_with_the_weights_of_one_process(found, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _check(found, "trainer", trainer(tmp_path, processes=1))
