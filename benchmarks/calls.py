"""How far a reader has to travel: the Python calls, functions and files of apo in one training step.

Run ``python benchmarks/calls.py``. A small perceptron trains with each front door and with the Kronecker
preconditioner; one ordinary step and one meta-step are traced. Counted are calls of functions under ``src/apo``, the
functions and files they lie in, and how often a call leads into another file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import apo

INSIDE = str(Path(apo.__file__).parent)


class Trace:
    """Counts the calls into apo while it is active."""

    def __init__(self) -> None:
        self.calls = 0
        self.changes = 0
        self.functions: set[tuple[str, int]] = set()
        self.files: Counter[str] = Counter()
        self.transitions: Counter[tuple[str, str]] = Counter()
        self._stack: list[str | None] = [None]

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        inside = name[len(INSIDE) + 1 :] if name.startswith(INSIDE) else None
        if event == "call":
            before = self._stack[-1]
            self._stack.append(inside or before)
            if inside is None:
                return
            self.calls += 1
            self.functions.add((inside, frame.f_code.co_firstlineno))
            self.files[inside] += 1
            if before is not None and before != inside:
                self.changes += 1
                self.transitions[before, inside] += 1
        elif event == "return" and len(self._stack) > 1:
            self._stack.pop()

    def __enter__(self) -> Trace:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def row(self) -> dict[str, int]:
        return {
            "calls": self.calls,
            "functions": len(self.functions),
            "files": len(self.files),
            "changes of file": self.changes,
        }


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def attached() -> Callable[[], None]:
    model, criterion = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tuner = apo.attach(optimizer, model, criterion)

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(torch.randn(16, 8)), torch.randint(3, (16,))).backward()
        optimizer.step()

    step.tuner = tuner  # type: ignore[attr-defined]
    return step


def explicit() -> Callable[[], None]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tuner = apo.APO(optimizer, model, nn.functional.cross_entropy)
    return lambda: tuner.step(torch.randn(16, 8), torch.randint(3, (16,)))


def kronecker() -> Callable[[], None]:
    model = network()
    tuner = apo.APO(apo.Kronecker(model, lr=0.1), model, nn.functional.cross_entropy)
    return lambda: tuner.step(torch.randn(16, 8), torch.randint(3, (16,)))


#: After so many steps an ordinary step and a meta-step are traced: both are beyond the beginning, where every step is a
#: meta-step, and meta-steps of every default interval.
MEASURED = (75, 80)
CASES = {"attach": attached, "explicit": explicit, "Kronecker": kronecker}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--files", action="store_true", help="list the files of each step and the changes between them")
    arguments = parser.parse_args()
    rows = {}
    for name, build in CASES.items():
        step = build()
        for _ in range(MEASURED[0]):
            step()
        for kind, steps in (("ordinary", 1), ("meta", MEASURED[1] - MEASURED[0])):
            for _ in range(steps - 1):
                step()
            with Trace() as trace:
                step()
            rows[f"{name}, {kind} step"] = trace.row()
            if arguments.files:
                print(name, kind, dict(trace.files.most_common()))
                print("   ", trace.transitions.most_common(40))
    width = max(len(name) for name in rows)
    print(" " * width, *(f"{column:>16}" for column in next(iter(rows.values()))))
    for name, row in rows.items():
        print(f"{name:{width}}", *(f"{value:16d}" for value in row.values()))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
