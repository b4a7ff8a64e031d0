"""The hyperparameters that sweeps have found, from the records of their runs or from their database.

The results of several sweeps over parts of a grid count together, wherever they were made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apo_experiments.errors import UserError
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record, grouped
from apo_experiments.results import value, variant
from apo_experiments.roles import is_swept, is_trial, trial_command
from apo_experiments.sweep.grid import holds_out, judging_metric, worst

#: How numbers are computed does not make one run a worse judge of another.
_COMPUTATION = {"validation", "precision", "cuda_graph", "channels_last", "tf32", "cudnn_benchmark"}


@dataclass(frozen=True)
class Choice:
    """The best hyperparameters, except those on how numbers are computed, and their origin, for the record.

    The origin has the metric and its value, how many points of how many epochs and seeds were tried, by which commands,
    and where they differ.
    """

    hyper: dict[str, Any]
    origin: dict[str, Any]


def choose(
    recipe: Recipe, label: str, scale: str, records: Sequence[Record], options: Mapping[str, Any], where: str = ""
) -> Choice:
    """Choose by the metric on validation data, if the task can hold some out.

    The runs with the most epochs decide: a longer sweep over the best points of a short one replaces it. Runs whose
    task has other ``options`` do not count.
    """
    tried = [record for record in records if _counts(recipe, label, scale, record, options)]
    longest = max((record.config.epochs for record in tried), default=0)
    whole = [record for record in tried if record.config.epochs == longest]
    groups = grouped(whole, lambda record: json.dumps(_searched(record), sort_keys=True, default=str))
    judged = [(judgement(recipe, group), group) for group in groups.values()]
    judged = [(figure, group) for figure, group in judged if math.isfinite(figure)]
    if not judged:
        what = "all that was tried diverged" if groups else "nothing was tried"
        raise UserError(
            f"--best finds no settings for {label} of {recipe.name} at scale {scale}{where and f' in {where}'}, since "
            f"{what} with the options of these runs: run `apo sweep {recipe.name} --scale {scale} --method {label}` "
            "first, or name the database of a sweep with --storage."
        )
    figure, group = recipe.best(judged, key=lambda pair: pair[0])
    hyper = _searched(group[0])
    axes = varied([group[0].config.hyper for group in groups.values()])
    commands = {json.dumps(trial_command(record)): None for group in groups.values() for record in group}
    origin = {
        "recipe": recipe.name,
        "metric": judging_metric(recipe, group[0]),
        "value": figure,
        "epochs": longest,
        "points": len(groups),
        "seeds": sum(record.header.get("seeds", 1) for record in group),
        "hyper": {key: hyper[key] for key in axes if key in hyper},
        "commands": [json.loads(command) for command in commands],
    }
    return Choice(hyper, origin)


def storage_of(recipe: Recipe, label: str, scale: str, records: Sequence[Record]) -> str | None:
    """Return the database of the newest sweep of an entry, if its command named one; passwords are not in records."""
    key = (recipe.name, label, scale)
    swept = [r for r in records if (r.config.recipe, r.config.label, r.config.scale) == key and is_trial(r)]
    newest = trial_command(max(swept, key=lambda record: str(record.header.get("started", "")))) if swept else []
    for word, following in zip(newest, [*newest[1:], ""], strict=False):
        if word == "--storage" or word.startswith("--storage="):
            return word.partition("=")[2] or following
    return None


def varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same in all settings.

    Example:
        >>> varied([{"lr": 0.1, "mu": 0.9}, {"lr": 0.3, "mu": 0.9, "clip": 1}])
        ['lr', 'clip']
    """
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return [key for key in keys if len({json.dumps(setting.get(key), default=str) for setting in settings}) > 1]


def _searched(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record.config.hyper.items() if key not in _COMPUTATION}


def _counts(recipe: Recipe, label: str, scale: str, record: Record, options: Mapping[str, Any]) -> bool:
    config = record.config
    if (config.recipe, config.label, config.scale) != (recipe.name, label, scale) or not record.finished:
        return False
    # Where nothing is held out, only the header tells a trial from a run by hand.
    if not is_trial(record) and (not holds_out(recipe) or record.header.get("chosen_by")):
        return False
    if holds_out(recipe) and not config.options.get("validation"):
        return False
    shared = (options.keys() & config.options.keys()) - _COMPUTATION - {"model", "dataset"}
    return all(json.dumps(options[key], default=str) == json.dumps(config.options[key], default=str) for key in shared)


def best_of_grid(recipe: Recipe, records: Iterable[Record]) -> list[Record]:
    """Return the runs of the best point of one entry, one per seed; none if no point is finished.

    As in the sweep itself, validation data decide if there are any, a point is judged by the mean over its seeds, and a
    point that diverged for any seed is the worst. Of runs of several lengths, the longest count.
    """
    return recipe.best(_points(records), key=lambda point: judgement(recipe, point), default=[])


def points_of_grids(records: Sequence[Record], shown: Iterable[Record]) -> dict[str, int]:
    """Return how many points were tried, by label, for the entries that a point of a sweep represents.

    Args:
        records: All runs of a recipe at a scale.
        shown: Those of them that represent it.
    """
    labels = dict.fromkeys(record.config.label for record in shown if is_swept(record))
    return {
        label: len(_points(record for record in records if record.config.label == label and is_swept(record)))
        for label in labels
    }


def judgement(recipe: Recipe, point: Sequence[Record]) -> float:
    """Return the mean over the seeds of a point, or the worst possible value if one of them diverged."""
    found = [value(record, judging_metric(recipe, record)) for record in point]
    known = [figure for figure in found if figure is not None]
    return math.fsum(known) / len(known) if len(known) == len(found) else worst(recipe)


def _points(records: Iterable[Record]) -> list[list[Record]]:
    """Return the finished runs of the greatest length, those of one point together."""
    finished = [record for record in records if record.finished]
    longest = max((record.config.epochs for record in finished), default=0)
    whole = [record for record in finished if record.config.epochs == longest]
    return list(grouped(whole, lambda record: variant(record.config)).values())
