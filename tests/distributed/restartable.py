"""Started by torchrun: train, save every ten steps, and be killed once on the way if asked to.

Usage: restartable.py FOLDER KILL_AT
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
#: Each with its wrapper. They train side by side: one start of the processes, and one blow, for all of them.
RUNS = [("rate", "ddp"), ("kronecker", "fsdp")]


def run(folder: Path, kill_at: int = -1) -> dict[str, dict[str, Any]]:
    """Train as one of several processes, every run from its last checkpoint if there is one."""
    tuners = {f"{rule}-{wrapper}": build(rule, wrapper, interval=4) for rule, wrapper in RUNS}
    starts = {}
    for name, tuner in tuners.items():
        path = latest_checkpoint(folder / name)
        starts[name] = 0 if path is None else load_checkpoint(tuner, path)["step"]
    for step in range(min(starts.values()), STEPS):
        if step == kill_at and not any(starts.values()) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for name, tuner in tuners.items():
            train(tuner, step, step + 1)
            if tuner.steps % SAVE_EVERY == 0:
                save_checkpoint(tuner, folder / name / f"step-{tuner.steps}", extra={"step": tuner.steps})
    return {name: outcome(tuner) | {"start": starts[name]} for name, tuner in tuners.items()}


def main(folder: Path, kill_at: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    result = run(folder, kill_at)
    if dist.get_rank() == 0:
        torch.save(result, folder / "outcome.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
