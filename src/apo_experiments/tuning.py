"""Which runs count: the best points of sweeps, from records or from a database, and the runs that represent a recipe.

The results of several sweeps over parts of a grid count together, wherever they were made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from apo_experiments.errors import UserError
from apo_experiments.recipe import Recipe
from apo_experiments.recipes import plan
from apo_experiments.records import Record, by_label, grouped
from apo_experiments.results import value, variant

#: How numbers are computed does not make one run a worse judge of another.
_COMPUTATION = {"validation", "precision", "cuda_graph", "channels_last", "tf32", "cudnn_benchmark"}


def choose(
    recipe: Recipe, label: str, scale: str, records: Sequence[Record], options: Mapping[str, Any], where: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Choose by the metric on validation data, if the task can hold some out.

    The runs with the most epochs decide: a longer sweep over the best points of a short one replaces it. Runs whose
    task has other ``options`` do not count.

    Returns:
        The best hyperparameters, except those on how numbers are computed, and their origin, for the record: the metric
        and its value, how many points of how many epochs and seeds were tried, by which commands, where they differ.
    """
    tried = (record for record in records if _counts(recipe, label, scale, record, options))
    found = points(tried, lambda record: json.dumps(_searched(record), sort_keys=True, default=str))
    judged = [(figure, point) for point in found if math.isfinite(figure := judgement(recipe, point))]
    if not judged:
        what = "all that was tried diverged" if found else "nothing was tried"
        raise UserError(
            f"--best finds no settings for {label} of {recipe.name} at scale {scale}{where and f' in {where}'}, since "
            f"{what} with the options of these runs: run `apo sweep {recipe.name} --scale {scale} --method {label}` "
            "first, or name the database of a sweep with --storage."
        )
    figure, best = recipe.best(judged, key=lambda pair: pair[0])
    hyper = _searched(best[0])
    axes = varied([point[0].config.hyper for point in found])
    commands = {json.dumps(record.trial_command): None for point in found for record in point}
    origin = {
        "recipe": recipe.name,
        "metric": judging_metric(recipe, best[0]),
        "value": figure,
        "epochs": best[0].config.epochs,
        "points": len(found),
        "seeds": sum(record.header.get("seeds", 1) for record in best),
        "hyper": {key: hyper[key] for key in axes if key in hyper},
        "commands": [json.loads(command) for command in commands],
    }
    return hyper, origin


def storage_of(recipe: Recipe, label: str, scale: str, records: Sequence[Record]) -> str | None:
    """Return the database of the newest sweep of an entry, if its command named one; passwords are not in records."""
    key = (recipe.name, label, scale)
    swept = [r for r in records if (r.config.recipe, r.config.label, r.config.scale) == key and r.is_trial]
    newest = max(swept, key=_start).trial_command if swept else []
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
    if not record.is_trial and (not holds_out(recipe) or record.header.get("chosen_by")):
        return False
    if holds_out(recipe) and not config.options.get("validation"):
        return False
    shared = (options.keys() & config.options.keys()) - _COMPUTATION - {"model", "dataset"}
    return all(json.dumps(options[key], default=str) == json.dumps(config.options[key], default=str) for key in shared)


def holds_out(recipe: Recipe) -> bool:
    """Return whether sweeps of a recipe hold out a part of the training data: not if it is about training."""
    return "validation" in recipe.defaults and not recipe.metric.startswith("train")


def judging_metric(recipe: Recipe, record: Record) -> str:
    """Return the metric that chooses hyperparameters: of the validation data if the run has it, else the recipe's own.

    A test metric without a namesake on the validation data, such as a BLEU score that is too costly to compute twice,
    is replaced by the validation accuracy or loss: test data must not choose.
    """
    if recipe.metric.startswith("train"):
        return recipe.metric
    general = "valid_accuracy" if recipe.goal == "max" else "valid_loss"
    candidates = (f"valid_{recipe.metric.removeprefix('test_')}", general, recipe.metric)
    return next((name for name in candidates if name in record.metrics), recipe.metric)


def worst(recipe: Recipe) -> float:
    """Return the value of a run that diverged."""
    return math.inf if recipe.goal == "min" else -math.inf


def judgement(recipe: Recipe, point: Sequence[Record]) -> float:
    """Return the mean over the seeds of a point, or the worst possible value if one of them diverged.

    Validation data decide if there are any, as in the sweep itself.
    """
    found = [value(record, judging_metric(recipe, record)) for record in point]
    known = [figure for figure in found if figure is not None]
    return math.fsum(known) / len(known) if len(known) == len(found) else worst(recipe)


def points(
    records: Iterable[Record], key: Callable[[Record], str] = lambda record: variant(record.config)
) -> list[list[Record]]:
    """Return the finished runs of the greatest length, those of one point together."""
    finished = [record for record in records if record.finished]
    longest = max((record.config.epochs for record in finished), default=0)
    return list(grouped([record for record in finished if record.config.epochs == longest], key).values())


def current(recipe: Recipe, scale: str, records: Iterable[Record]) -> list[Record]:
    """Return the runs that represent a recipe at a scale: one setting for each entry, in the recipe's order.

    Sweeps and ``--set`` leave runs of the same entry with other settings. The last setting that was chosen by a sweep
    is preferred, then the one that the recipe plans now; if neither has been run, the one that was started last. If
    there is only a sweep, its best point represents the entry.

    Args:
        recipe: The recipe.
        scale: The scale.
        records: All records; those of other recipes and scales are left out.
    """
    planned = {variant(config) for config in plan(recipe, scale)}
    order = {entry.label: position for position, entry in enumerate(recipe.entries)}
    here = [record for record in records if (record.config.recipe, record.config.scale) == (recipe.name, scale)]
    chosen: list[Record] = []
    for group in by_label(record for record in here if record.config.label in order).values():
        by_hand = [record for record in group if not record.is_swept]
        if not by_hand:
            chosen += recipe.best(points(group), key=lambda point: judgement(recipe, point), default=[])
            continue
        tuned = [record for record in group if record.chosen_by]
        wanted = set() if tuned else planned & {variant(record.config) for record in group}
        if not wanted:
            wanted = {variant(max(tuned or by_hand, key=_start).config)}
        chosen += one_per_seed(record for record in group if variant(record.config) in wanted)
    return sorted(chosen, key=lambda record: (order[record.config.label], record.config.seed))


def one_per_seed(records: Iterable[Record]) -> list[Record]:
    """Return the run of each seed that was started last, of runs with the same settings.

    There are two of one seed if a setting that is newer than the first run has changed the name of its folder.
    """
    found = {record.config.seed: record for record in sorted(records, key=_start)}
    return sorted(found.values(), key=lambda record: record.config.seed)


def _start(record: Record) -> str:
    return str(record.header.get("started", ""))
