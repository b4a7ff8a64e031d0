"""Train one tiny run in a process of its own, which a test then ends in one way or another.

Usage: python -m tests.experiments.train.worker ROOT METHOD [--save-at STEP ...] [--die-at STEP] [--pause SECONDS]
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from unittest import mock

import torch
from tests.experiments.stand_ins import install
from tests.experiments.train import tiny

from apo_experiments.train import train
from apo_experiments.training import Checkpoint, Training


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("method")
    parser.add_argument("--save-at", type=int, nargs="*", default=[])
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--pause", type=float, default=0.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    install(tiny.RECIPES, tiny.METHODS)

    taken = 0
    step = Training.advance

    def advance(run: Training) -> None:
        nonlocal taken
        if run.step + 1 == arguments.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        step(run)
        taken = run.step
        print(taken, flush=True)
        time.sleep(arguments.pause)

    with (
        mock.patch.object(Training, "advance", advance),
        mock.patch.object(Checkpoint, "due", lambda checkpoint: taken in arguments.save_at),
    ):
        train(tiny.config(arguments.method), root=arguments.root)


if __name__ == "__main__":
    main()
