"""What one method reached on one task, beside the tuned cosine of the same base optimizer, and over all tasks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from apo_experiments.no_tuning.choice import Runs, calibrated, guess_of, regret, tuned
from apo_experiments.recipe import Recipe
from apo_experiments.recipes.untuned import USUAL, base_of, label_of
from apo_experiments.records import Record, by_label
from apo_experiments.results import value
from apo_experiments.tuning import current

__all__ = ["DEAD", "NEAR", "Score", "Standing", "Task", "ranks", "scored", "standings", "task_runs"]

#: A run that learned less than this share of what the reference learned is dead.
DEAD = 0.05


@dataclass(frozen=True)
class Score:
    """One method on one task.

    Attributes:
        name: The method's name on the page: that of its entry, or "SGDm tuned", "NadamW calibrated" and so on.
        label: The label of its entry.
        values: The test metric at the end of each run that has one.
        train_losses: The training loss of the last epoch, likewise.
        runs: How many there are.
        dead: How many diverged, or learned less than :data:`DEAD` of what the reference learned.
        regret: In per cent of what the tuned cosine of the same base learned; the mean over the runs.
        regret_at_equal_time: The same when the reference's training time is over.
        relative_time: Mean training time, without evaluation, divided by the reference's.
    """

    name: str
    label: str
    values: tuple[float, ...]
    train_losses: tuple[float, ...]
    runs: int
    dead: int
    regret: float
    regret_at_equal_time: float
    relative_time: float

    @property
    def mean(self) -> float | None:
        """The mean of the values."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def train_loss(self) -> float | None:
        """The mean of the training losses."""
        return statistics.fmean(self.train_losses) if self.train_losses else None

    @property
    def spread(self) -> float | None:
        """The standard deviation of the values; None for fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Task:
    """All methods on one task.

    Attributes:
        recipe: The task.
        scores: By name.
        references: The names of the tuned cosines, which are not among those without tuning.
    """

    recipe: Recipe
    scores: Mapping[str, Score]
    references: tuple[str, ...]


def task_runs(recipes: Iterable[Recipe], scale: str, records: Sequence[Record]) -> dict[str, tuple[Recipe, Runs]]:
    """Return the runs of each task that has any: one setting for each label."""
    found: dict[str, tuple[Recipe, Runs]] = {}
    for recipe in recipes:
        if runs := by_label(current(recipe, scale, records)):
            found[recipe.name] = recipe, runs
    return found


def scored(tasks: Mapping[str, tuple[Recipe, Runs]]) -> dict[str, Task]:
    """Return the scores of all methods, for each task with tuned cosines of SGDm and AdamW.

    Args:
        tasks: As from :func:`task_runs`.
    """
    found, one_for_all = {}, calibrated(tasks)
    for name, (recipe, runs) in tasks.items():
        references = {base: tuned(recipe, runs, base) for base in USUAL}
        best = {base: _mean(recipe, runs[label]) for base, label in references.items() if label}
        if any(best.get(base) is None for base in USUAL):
            continue
        scores = {}
        for shown, label in _names(runs, references, one_for_all).items():
            base = base_of(label)
            reference = runs[references[base]]  # type: ignore[index]
            scores[shown] = _score(recipe, shown, runs[label], best[base], reference)  # type: ignore[arg-type]
        found[name] = Task(recipe, scores, tuple(f"{base} tuned" for base in USUAL))
    return found


def _names(runs: Runs, references: Mapping[str, str | None], one_for_all: str | None) -> dict[str, str]:
    """Return the label of each method that is shown: not all cosines are."""
    names = {label: label for label in runs if "-cosine-" not in label}
    names |= {f"{base} tuned": label for base, label in references.items() if label}
    names |= {f"{base} usual": label for base, rate in USUAL.items() if (label := label_of(base, rate)) in runs}
    if one_for_all is not None and one_for_all in runs:
        names["NadamW calibrated"] = one_for_all
    return names


def _score(recipe: Recipe, name: str, records: Sequence[Record], best: float, reference: Sequence[Record]) -> Score:
    guess = guess_of([*records, *reference])
    finals = [value(record, recipe.metric) for record in records]
    losses = [value(record, "train_loss") for record in records]
    limit = _seconds(reference)
    in_time = [_at(recipe, record, limit, guess) for record in records]
    dead = sum(final is None or (final - guess) / (best - guess) < DEAD for final in finals)
    return Score(
        name,
        records[0].config.label,
        tuple(final for final in finals if final is not None),
        tuple(loss for loss in losses if loss is not None),
        len(records),
        dead,
        statistics.fmean(regret(recipe, final, best, guess) for final in finals),
        statistics.fmean(regret(recipe, final, best, guess) for final in in_time),
        _seconds(records) / limit if limit else math.nan,
    )


def _mean(recipe: Recipe, records: Sequence[Record]) -> float | None:
    finals = [value(record, recipe.metric) for record in records]
    known = [final for final in finals if final is not None]
    return statistics.fmean(known) if known and len(known) == len(finals) else None


def _seconds(records: Sequence[Record]) -> float:
    return statistics.fmean((record.summary or {}).get("seconds") or 0.0 for record in records)


def _at(recipe: Recipe, record: Record, seconds: float, guess: float) -> float | None:
    """Return the metric after so many seconds of training, on the line between the evaluations before and after."""
    if value(record, recipe.metric) is None:
        return None
    before = (0.0, guess)
    for row in record.rows:
        here = (row.get("seconds"), row.get(recipe.metric))
        if here[0] is None or here[1] is None:
            continue
        if here[0] >= seconds:
            span = here[0] - before[0]
            share = (seconds - before[0]) / span if span > 0 else 1.0
            return before[1] + share * (here[1] - before[1])
        before = (float(here[0]), float(here[1]))
    return value(record, recipe.metric)


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
        ...     return Score(name, name, values, (), 1, 0, 0.0, 0.0, 1.0)
        >>> scores = {one.name: one for one in (score("A", 90.0), score("B"), score("C", 95.0), score("D", 90.0))}
        >>> ranks(Task(recipe, scores, ()))
        {'A': 2.5, 'B': 4.0, 'C': 1.0, 'D': 2.5}
    """
    sign = 1 if task.recipe.goal == "max" else -1
    merit = {
        name: -math.inf if score.mean is None or len(score.values) < score.runs else sign * score.mean
        for name, score in task.scores.items()
        if name not in task.references
    }
    return {
        name: 1 + sum(other > own for other in merit.values()) + (sum(other == own for other in merit.values()) - 1) / 2
        for name, own in merit.items()
    }
