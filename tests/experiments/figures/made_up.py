"""Records that nobody trained, with everything that a figure can meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from apo_experiments.recipe import Entry, Recipe, Scale
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig


def recipe(entries: Sequence[Entry], **changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "name": "made-up",
        "title": "A recipe that nobody trained",
        "paper": "Figure 0",
        "task": None,
        "defaults": {},
        "data": (),
        "scales": {"cpu": Scale(20, 3, 1)},
        "entries": tuple(entries),
        "metric": "test_accuracy",
        "goal": "max",
    }
    return Recipe(**(fields | changes))


def record(
    entry: Entry, seed: int, rows: list[dict[str, Any]], metrics: dict[str, Any] | None, **config: Any
) -> Record:
    """Make a record; metrics None for a run that is not finished, a metric None for one that diverged."""
    settings = RunConfig("made-up", entry.label, entry.method, "cpu", seed, 20, dict(entry.hyper), **config)
    diverged = metrics is not None and None in metrics.values()
    summary = None if metrics is None else {"metrics": metrics, "seconds": 60.0, "diverged": diverged}
    return Record(settings, {"started": "2024-01-01"}, rows, summary)


def training(entry: Entry, seed: int, speed: float = 0.3, epochs: int = 20) -> Record:
    """Make a run whose loss falls exponentially."""
    rows = [
        {
            "kind": "row",
            "step": 10 * epoch,
            "epoch": float(epoch),
            "train_loss": math.exp(-speed * epoch) * (1 + 0.1 * seed),
            "test_accuracy": 90 * (1 - math.exp(-speed * epoch)) + seed,
            "rate": 0.1 / epoch if "apo" in entry.method else 0.1,
            "seconds": float(epoch),
        }
        for epoch in range(1, epochs + 1)
    ]
    return record(entry, seed, rows, {"test_accuracy": rows[-1]["test_accuracy"], "train_loss": rows[-1]["train_loss"]})
