"""Rates that records choose: the best of a task for SGDm and AdamW, and one for all tasks for NadamW.

Held-out data decide, never test data. Nothing here is typed: other records may choose other rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from apo_experiments.recipe import Recipe
from apo_experiments.recipes.untuned import RATES, label_of
from apo_experiments.records import Record
from apo_experiments.results import value
from apo_experiments.tuning import judgement

__all__ = ["calibrated", "regret", "tuned"]

#: The runs of one task, by label.
Runs = Mapping[str, Sequence[Record]]


def regret(recipe: Recipe, found: float | None, best: float, guess: float) -> float:
    r"""Return how much less than the best was learned, in per cent, from :math:`-\infty` to 100.

    Of accuracy: :math:`100\,(1 - a/a_{best})`. Of a loss: :math:`100\,(1 - (l_0 - l)/(l_0 - l_{best}))`, where
    :math:`l_0` is the loss of the best prediction that does not look at its input. A run that diverged has 100.

    Example:
        >>> recipe = Recipe("r", "", "", None, {}, (), {}, (), metric="test_loss", goal="min")
        >>> regret(recipe, found=0.75, best=0.5, guess=1.0), regret(recipe, None, 0.5, 1.0)
        (50.0, 100.0)
    """
    if found is None or not math.isfinite(found):
        return 100.0
    learned, possible = (found, best) if recipe.goal == "max" else (guess - found, guess - best)
    if possible <= 0:
        return 0.0 if learned >= possible else 100.0
    return min(100.0, 100 * (possible - learned) / possible)


def tuned(recipe: Recipe, runs: Runs, base: str) -> str | None:
    """Return the label of the cosine of an optimizer that is best on held-out data, or None if none was run."""
    labels = [label for rate in RATES[base] if runs.get(label := label_of(base, rate))]
    return recipe.best(labels, key=lambda label: judgement(recipe, runs[label]), default=None)


def calibrated(tasks: Mapping[str, tuple[Recipe, Runs]], base: str = "NadamW") -> str | None:
    """Return the label of the cosine with the least mean regret on held-out data over all tasks together.

    On each task the best rate of the same optimizer is what a rate is compared with. Only tasks with all rates count.

    Args:
        tasks: Recipe and runs of each task.
        base: The optimizer.

    Returns:
        The label, or None if no task has all rates.
    """
    labels = [label_of(base, rate) for rate in RATES[base]]
    complete = [(recipe, runs) for recipe, runs in tasks.values() if all(runs.get(label) for label in labels)]
    if not complete:
        return None
    sums = dict.fromkeys(labels, 0.0)
    for recipe, runs in complete:
        judged = {label: judgement(recipe, runs[label]) for label in labels}
        best = recipe.best(judged.values())
        guess = guess_of(runs[labels[0]])
        for label, figure in judged.items():
            sums[label] += regret(recipe, figure, best, guess)
    return min(labels, key=lambda label: sums[label])


def guess_of(records: Sequence[Record]) -> float:
    """Return the metric of a guess without looking, which all runs of a task report; NaN if none lived to do so."""
    rows = (row["guess"] for record in records for row in record.rows if row.get("guess") is not None)
    finals = (value(record, "guess") for record in records)
    return next((float(found) for found in [*finals, *rows] if found is not None), math.nan)
