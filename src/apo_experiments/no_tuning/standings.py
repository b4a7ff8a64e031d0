"""What each method reached over all tasks together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from apo_experiments.no_tuning.scores import Score, Task

__all__ = ["NEAR", "Standing", "ranks", "standings"]

#: A regret of at most so many per cent counts as reaching the tuned rate.
NEAR = 1.0


@dataclass(frozen=True)
class Standing:
    """One method over its tasks.

    Attributes:
        name: Of the method.
        tasks: How many tasks it has run.
        regret: The mean over them.
        worst: The largest of them, and on which task.
        near: On how many it is within :data:`NEAR` of the tuned rate, or above it.
        rank: Its mean rank among the methods without tuning; None for a tuned one.
        runs: How many runs it has.
        dead: How many of them diverged or learned nothing.
        regret_at_equal_time: The mean over the tasks.
        relative_time: The mean of its training time over that of the tuned rate.
    """

    name: str
    tasks: int
    regret: float
    worst: tuple[float, str]
    near: int
    rank: float | None
    runs: int
    dead: int
    regret_at_equal_time: float
    relative_time: float


def standings(tasks: Mapping[str, Task]) -> list[Standing]:
    """Return one standing for each method, by mean rank, the tuned ones first.

    Args:
        tasks: As from :func:`apo_experiments.no_tuning.scores.scored`.
    """
    placed = {name: ranks(task) for name, task in tasks.items()}
    methods = dict.fromkeys(method for task in tasks.values() for method in task.scores)
    found = []
    for method in methods:
        scores = {name: task.scores[method] for name, task in tasks.items() if method in task.scores}
        own = [placed[name][method] for name in scores if method in placed[name]]
        regrets = {name: score.regret for name, score in scores.items()}
        worst = max(regrets, key=lambda name: regrets[name])
        found.append(
            Standing(
                method,
                len(scores),
                statistics.fmean(regrets.values()),
                (regrets[worst], worst),
                sum(figure <= NEAR for figure in regrets.values()),
                statistics.fmean(own) if own else None,
                sum(score.runs for score in scores.values()),
                sum(score.dead for score in scores.values()),
                statistics.fmean(score.regret_at_equal_time for score in scores.values()),
                statistics.fmean(score.relative_time for score in scores.values()),
            )
        )
    return sorted(found, key=lambda one: (one.rank is not None, one.rank or 0.0, one.regret))


def ranks(task: Task) -> dict[str, float]:
    """Return the rank of each method without tuning by its mean on the test data; equals share the mean of theirs.

    A method is behind all others if one of its runs has no result.

    Example:
        >>> from apo_experiments.recipe import Recipe
        >>> recipe = Recipe("r", "", "", None, {}, (), {}, (), metric="test_accuracy", goal="max")
        >>> def score(name, *values):
        ...     return Score(name, name, values, (), 1, 0, 0.0, 0.0, 1.0, 1.0)
        >>> scores = {one.name: one for one in (score("A", 90.0), score("B"), score("C", 95.0), score("D", 90.0))}
        >>> ranks(Task(recipe, scores, ()))
        {'A': 2.5, 'B': 4.0, 'C': 1.0, 'D': 2.5}
    """
    merit = {name: _merit(task, score) for name, score in task.scores.items() if name not in task.references}
    return {
        name: 1 + sum(other > own for other in merit.values()) + (sum(other == own for other in merit.values()) - 1) / 2
        for name, own in merit.items()
    }


def _merit(task: Task, score: Score) -> float:
    if score.mean is None or len(score.values) < score.runs:
        return -math.inf
    return score.mean if task.recipe.goal == "max" else -score.mean
