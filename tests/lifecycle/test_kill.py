from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.programs import Program

STEPS = 30


def start(folder: Path) -> Program:
    return Program("tests.lifecycle.interruptible", folder, STEPS)


def finish(folder: Path) -> tuple[list[int], dict[str, list[torch.Tensor]]]:
    output, _ = (process := start(folder)).communicate(timeout=300)
    assert process.returncode == 0
    return [int(line) for line in output.split()], torch.load(folder / "final.pt", weights_only=True)


def kill_after(folder: Path, step: int, delay: float) -> None:
    process = start(folder)
    for line in process.stdout:
        if int(line) >= step:
            break
    time.sleep(delay)  # anywhere within a step, a meta-step or the writing of a checkpoint
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_process_ends_at_the_weights_of_one_that_was_not(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    steps, expected = finish(whole)
    assert steps == list(range(STEPS))
    chance = random.Random()
    kills = sorted(chance.sample(range(2, STEPS - 6), 2))
    for step in kills:
        kill_after(killed, step, chance.uniform(0.0, 0.05))
    steps, found = finish(killed)
    assert 0 < steps[0] < STEPS
    assert expected.keys() == found.keys()
    differing = [name for name in expected if not all(map(torch.equal, expected[name], found[name]))]
    assert not differing, f"killed after steps {kills}"
