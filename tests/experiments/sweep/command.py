"""``apo sweep`` on the tiny recipe, in a process of its own; prints the rows as JSON.

Usage: python -m tests.experiments.sweep.command ROOT [--storage URL] [--jobs N] [--patience SECONDS]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.experiments.stand_ins import install
from tests.experiments.sweep import tiny

from apo_experiments import sweep
from apo_experiments.train import Listener

if __name__ in ("__main__", "__mp_main__"):  # the second in processes that are spawned
    install(tiny.RECIPES, tiny.METHODS)


class Lines(Listener):
    """A listener whose lines a test can wait for."""

    def message(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--storage")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--patience", type=float, default=600.0)
    arguments = parser.parse_args()
    places = {"storage": arguments.storage, "patience": arguments.patience}
    rows = sweep.run(sweep.Order("parabola", arguments.root, ["Descent"], "smoke", **places), arguments.jobs, Lines)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
