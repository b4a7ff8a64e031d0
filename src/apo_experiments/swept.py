"""The best point of a sweep, which represents a method if only a sweep has been run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from apo_experiments.recipe import Recipe
from apo_experiments.records import Record, grouped
from apo_experiments.results import value, variant
from apo_experiments.roles import is_swept
from apo_experiments.sweep.grid import judging_metric, worst


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
