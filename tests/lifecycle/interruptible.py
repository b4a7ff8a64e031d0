"""Train every rule through both doors with checkpoints, as a process of its own that may be killed at any time.

    python -m tests.lifecycle.interruptible FOLDER STEPS

Each line of output is the number of a finished step. Started again in the same folder, it continues from the last
checkpoint; the final weights are in ``FOLDER/final.pt``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.lifecycle.harness import DOORS, RULES, Run, network_with_dropout_and_batchnorm

STEPS_PER_CHECKPOINT = 3


def save_atomically(state: Any, path: Path) -> None:
    """Write beside the file and rename: a process that is killed here leaves the old checkpoint whole."""
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    runs = {f"{door}, {rule}": Run(door, rule, network_with_dropout_and_batchnorm) for door in DOORS for rule in RULES}
    torch.manual_seed(1)
    start, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        start = saved["step"]
        for name, run in runs.items():
            run.model.load_state_dict(saved["runs"][name]["model"])
            run.tuner.load_state_dict(saved["runs"][name]["tuner"])
    for step in range(start, steps):
        if step % STEPS_PER_CHECKPOINT == 0:
            states = {n: {"model": run.model.state_dict(), "tuner": run.tuner.state_dict()} for n, run in runs.items()}
            save_atomically({"step": step, "runs": states}, checkpoint)
        for run in runs.values():
            run.train([step])
        print(step, flush=True)
    save_atomically({name: run.weights() for name, run in runs.items()}, folder / "final.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
