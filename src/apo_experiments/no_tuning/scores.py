"""What one method reached on one task, beside the tuned cosine of the same base optimizer, and over all tasks.

Records choose the rates: the best of a task for SGDm and AdamW, and one for all tasks for NadamW. Held-out data decide,
never test data. Nothing here is typed: other records may choose other rates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import pandas

from apo_experiments.recipe import Recipe
from apo_experiments.recipes.no_tuning import RATES, USUAL, base_of, label_of
from apo_experiments.records import Record, by_label
from apo_experiments.results import value
from apo_experiments.tuning import current, judgement

#: The runs of one task, by label.
Runs = Mapping[str, Sequence[Record]]

#: A ``pandas.DataFrame``, of whose operations a type checker can follow few.
Table = Any

#: A run that learned less than this share of what the reference learned is dead.
DEAD = 0.05

#: A regret of at most so many per cent counts as reaching the tuned rate.
NEAR = 1.0

#: The tuned cosines, which are not among the methods without tuning.
TUNED = tuple(f"{base} tuned" for base in USUAL)


def task_runs(recipes: Iterable[Recipe], scale: str, records: Sequence[Record]) -> dict[str, tuple[Recipe, Runs]]:
    """Return the runs of each task that has any: one setting for each label."""
    found: dict[str, tuple[Recipe, Runs]] = {}
    for recipe in recipes:
        if runs := by_label(current(recipe, scale, records)):
            found[recipe.name] = recipe, runs
    return found


def scores(tasks: Mapping[str, tuple[Recipe, Runs]]) -> Table:
    """Return the scores of all methods on each task with tuned cosines of SGDm and AdamW.

    Args:
        tasks: As from :func:`task_runs`.

    Returns:
        One row for each task and method, with the columns

        - ``task``, ``method`` (that of its entry, or "SGDm tuned", "NadamW calibrated" and so on) and ``entry``;
        - ``metric``, ``mean`` and ``spread``: the test metric at the end, and its standard deviation;
        - ``train_loss``: of the last epoch, the mean;
        - ``runs``, and how many of them are ``dead``: diverged, or learned less than :data:`DEAD` of the reference;
        - ``regret``: in per cent of what the tuned cosine of the same base learned, the mean over the runs;
        - ``regret_at_equal_time``: the same when the reference's training time is over;
        - ``relative_time``: mean training time, without evaluation, divided by the reference's;
        - ``rank``: among the methods without tuning, by the mean. Equals share the mean of theirs, and a method with a
          run that has no result is behind all others.
    """
    found, one_for_all = [], calibrated(tasks)
    for task, (recipe, runs) in tasks.items():
        references = {base: label for base in USUAL if (label := tuned(recipe, runs, base))}
        best = {base: _finals(recipe, runs[label]) for base, label in references.items()}
        if len(best) < len(USUAL) or any(None in finals for finals in best.values()):
            continue
        # Not all cosines are shown.
        names = {label: label for label in runs if "-cosine-" not in label}
        names |= {f"{base} tuned": label for base, label in references.items()}
        names |= {f"{base} usual": label for base, rate in USUAL.items() if (label := label_of(base, rate)) in runs}
        if one_for_all is not None and one_for_all in runs:
            names["NadamW calibrated"] = one_for_all
        for method, label in names.items():
            base = base_of(label)
            row = _score(recipe, runs[label], runs[references[base]], statistics.fmean(best[base]))  # type: ignore[arg-type]
            found.append({"task": task, "method": method, "entry": label, **row})
    if not found:
        return pandas.DataFrame()
    table = pandas.DataFrame(found)
    ranked = table[~table["method"].isin(TUNED)].groupby("task")["merit"]
    return table.assign(rank=ranked.rank(ascending=False)).drop(columns="merit")


def standings(table: Table) -> Table:
    """Return one row for each method, by mean rank, the tuned ones first.

    Args:
        table: As from :func:`scores`, not empty.

    Returns:
        By method: the number of ``tasks``; the means of ``regret``, ``regret_at_equal_time``, ``relative_time`` and
        ``rank`` (NaN for a tuned one); the sums of ``runs`` and ``dead``; on how many tasks it is ``near`` the tuned
        rate, or above it; the ``worst`` regret, and its ``worst_task``.
    """
    groups = table.assign(near=table["regret"] <= NEAR).groupby("method", sort=False)
    means = groups[["regret", "regret_at_equal_time", "relative_time", "rank"]].mean()
    worst = table.loc[groups["regret"].idxmax()].set_index("method")
    found = means.join(groups[["near", "runs", "dead"]].sum()).assign(tasks=groups.size())
    found = found.assign(worst=worst["regret"], worst_task=worst["task"])
    return found.sort_values(["rank", "regret"], na_position="first")


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


def _score(recipe: Recipe, records: Sequence[Record], reference: Sequence[Record], best: float) -> dict[str, Any]:
    guess = guess_of([*records, *reference])
    finals = _finals(recipe, records)
    known = [final for final in finals if final is not None]
    losses = [loss for record in records if (loss := value(record, "train_loss")) is not None]
    seconds, limit = (statistics.fmean(record.seconds for record in group) for group in (records, reference))
    in_time = [_at(recipe, record, limit, guess) for record in records]
    mean = statistics.fmean(known) if known else math.nan
    merit = mean if recipe.goal == "max" else -mean
    return {
        "metric": recipe.metric,
        "mean": mean,
        "spread": statistics.stdev(known) if len(known) > 1 else math.nan,
        "train_loss": statistics.fmean(losses) if losses else math.nan,
        "runs": len(records),
        "dead": sum(final is None or (final - guess) / (best - guess) < DEAD for final in finals),
        "regret": statistics.fmean(regret(recipe, final, best, guess) for final in finals),
        "regret_at_equal_time": statistics.fmean(regret(recipe, final, best, guess) for final in in_time),
        "relative_time": seconds / limit if limit else math.nan,
        "merit": merit if len(known) == len(finals) else -math.inf,
    }


def _finals(recipe: Recipe, records: Sequence[Record]) -> list[float | None]:
    return [value(record, recipe.metric) for record in records]


def _at(recipe: Recipe, record: Record, seconds: float, guess: float) -> float | None:
    """Return the metric after so many seconds of training, on the line between the evaluations before and after."""
    final = value(record, recipe.metric)
    points = [(row["seconds"], row[recipe.metric]) for row in record.rows if row.get(recipe.metric) is not None]
    if final is None or not points or points[-1][0] < seconds:
        return final
    times, values = zip((0.0, guess), *points, strict=True)
    return float(numpy.interp(seconds, times, values))
