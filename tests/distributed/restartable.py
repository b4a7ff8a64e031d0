"""Started by torchrun: train, save every ten steps, and be killed once on the way if asked to.

Usage: restartable.py FOLDER RULE WRAPPER KILL_AT
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.distributed.training import build, outcome, train

from apo.integrations.distributed import latest_checkpoint, load_checkpoint, save_checkpoint

STEPS, SAVE_EVERY = 40, 10


def run(folder: Path, rule: str, wrapper: str, kill_at: int = -1) -> dict[str, Any]:
    """Train as one of several processes, from the last checkpoint if there is one."""
    tuner = build(rule, wrapper, interval=4)
    path = latest_checkpoint(folder / "checkpoints")
    start = 0 if path is None else load_checkpoint(tuner, path)["step"]
    for step in range(start, STEPS):
        if step == kill_at and start == 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train(tuner, step, step + 1)
        if tuner.steps % SAVE_EVERY == 0:
            save_checkpoint(tuner, folder / "checkpoints" / f"step-{tuner.steps}", extra={"step": tuner.steps})
    return outcome(tuner) | {"start": start}


def main(folder: Path, rule: str, wrapper: str, kill_at: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    result = run(folder, rule, wrapper, kill_at)
    if dist.get_rank() == 0:
        torch.save(result, folder / "outcome.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
