"""The runs that were made to choose hyperparameters: one small file per recipe and scale, one line per run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apo_experiments.publication.compact import clean_command, read_lines, rounded, write_lines
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record
from apo_experiments.results import value, variant
from apo_experiments.roles import is_swept, is_trial, trial_command
from apo_experiments.tuning import judging_metric

_NAME = "tuning.jsonl"


def is_tuning(record: Record) -> bool:
    """Return whether a run was made to choose hyperparameters, and is therefore not a result."""
    return bool(record.config.options.get("validation")) or is_swept(record)


def finals(records: Sequence[Record]) -> list[Record]:
    """Return the runs that are results.

    A run of a sweep without held-out data counts if other results have the same settings: it is their first seed.
    """
    settings = {variant(record.config) for record in records if not is_tuning(record)}
    return [record for record in records if variant(record.config) in settings]


def log_tuning(recipe: Recipe, scale: str, records: Sequence[Record], folder: Path) -> Path | None:
    """Add runs to the log of a recipe. Runs that are already in the log stay as they are.

    Args:
        recipe: The recipe.
        scale: The scale.
        records: All records.
        folder: The folder of all compact records.

    Returns:
        The file, or None if there is nothing to log.
    """
    own = [r for r in records if (r.config.recipe, r.config.scale) == (recipe.name, scale) and r.finished]
    new = {record.config.identity(): _line(recipe, record) for record in own if is_tuning(record) or is_trial(record)}
    if not new:
        return None
    path = folder / recipe.name / scale / _NAME
    known = {line["run"]: line for line in read_tuning(folder, recipe.name, scale)}
    merged = sorted({**new, **known}.values(), key=lambda line: (line["method"], line["epochs"], line["run"]))
    write_lines(path, merged)
    return path


def read_tuning(folder: Path, recipe: str, scale: str) -> list[dict[str, Any]]:
    """Return the lines of a log, or none if it does not exist."""
    return read_lines(folder / recipe / scale / _NAME)


def _line(recipe: Recipe, record: Record) -> dict[str, Any]:
    config, summary = record.config, record.summary or {}
    metric = judging_metric(recipe, record)
    line = {
        "run": config.identity(),
        "method": config.label,
        "seed": config.seed,
        "epochs": config.epochs,
        "metric": metric,
        "value": value(record, metric),
        "seconds": summary.get("seconds"),
        "hyper": dict(config.hyper),
        "command": clean_command(trial_command(record)),
    }
    return rounded(line)
