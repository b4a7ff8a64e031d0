"""Records of the benchmark that nobody has run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apo_experiments.recipes import RECIPES, plan
from apo_experiments.records import Record

#: (seconds, test metric) at the end of each epoch.
Curve = Sequence[tuple[float, float]]


def run(
    task: str,
    label: str,
    test: float | None,
    valid: float | None = None,
    *,
    seed: int = 0,
    seconds: float = 10.0,
    guess: float | None = 1.0,
    train_loss: float = 0.5,
    curve: Curve | None = None,
    scale: str = "cpu",
) -> Record:
    """A finished run of a task with this test metric; None if it diverged."""
    recipe = RECIPES[f"no-tuning-{task}"]
    (config,) = [config for config in plan(recipe, scale, [label], seeds=seed + 1) if config.seed == seed]
    points = curve if curve is not None else [(seconds / 2, 0.9 * (test or 1.0)), (seconds, test)]
    rows: list[dict[str, Any]] = [
        {
            "kind": "row",
            "step": 10 * epoch,
            "epoch": epoch,
            "train_loss": train_loss,
            "rate": 0.1 / epoch,
            "seconds": when,
            recipe.metric: value,
            "guess": guess,
        }
        for epoch, (when, value) in enumerate(points, 1)
        if value is not None
    ]
    judged = recipe.metric.replace("test_", "valid_")
    metrics = {recipe.metric: test, judged: test if valid is None else valid, "train_loss": train_loss, "guess": guess}
    if test is None:
        metrics = dict.fromkeys(metrics)
    summary = {"kind": "summary", "metrics": metrics, "seconds": seconds, "steps": 20, "diverged": test is None}
    header = {"command": ["apo", "run", recipe.name], "started": "2026-01-01T00:00:00+00:00"}
    return Record(config, header, rows, summary)
