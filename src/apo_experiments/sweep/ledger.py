"""The ledger of a search: which worker tries which point of the grid, and the results.

It is an Optuna study. A trial is a claim on a point, and claims need no lock: the database numbers the trials of a
study consecutively, and of several claims on one point the one with the lowest number wins. A worker that has made a
claim looks for older ones and withdraws if one of them has not failed. So a point is never tried twice at the same
time, and never again once it is finished. A point whose trials have all failed can be claimed again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from apo_experiments.sweep.database import import_optuna
from apo_experiments.sweep.grid import Point, Search, worst
from apo_experiments.sweep.presence import Silences, is_gone, remove_card

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

__all__ = ["Claim", "Ledger"]

#: What Optuna raises on a change to a finished trial; it has a separate subclass since version 4.0.
_FINISHED = RuntimeError


@dataclass(frozen=True)
class Claim:
    """The right to try a point.

    Attributes:
        trial_id: Its key in the database.
        index: The place of the point in the order of the search.
        point: The point.
    """

    trial_id: int
    index: int
    point: Point


@final
class Ledger:
    """What is known about a search, for all workers on all machines.

    Args:
        search: The search.
        storage: The database.
        trials: How many points count, starting with the first; all by default.

    Example:
        >>> from apo_experiments.recipe import Recipe
        >>> from apo_experiments.sweep.database import open_database
        >>> recipe = Recipe("r", "", "", None, {}, (), {}, (), metric="test_loss", goal="min")
        >>> points = tuple(Point({"lr": rate}, ()) for rate in (0.1, 0.01))
        >>> ledger = Ledger(Search(recipe, "SGD", "smoke", {"lr": (0.1, 0.01)}, points), open_database("sqlite://"))
        >>> first, second = ledger.claim({"name": "me"}), ledger.claim({"name": "me"})
        >>> ledger.finish(first, 3.0, "test_loss"), ledger.fail(second, "out of memory")
        (True, True)
        >>> ledger.claim({"name": "me"}).point == second.point
        True
    """

    def __init__(self, search: Search, storage: RDBStorage, trials: int | None = None) -> None:
        self.search = search
        self.points = search.points[:trials]
        self._storage = storage
        self._optuna = import_optuna()
        direction = "minimize" if search.recipe.goal == "min" else "maximize"
        self._optuna.create_study(storage=storage, study_name=search.name, direction=direction, load_if_exists=True)
        self._study_id = storage.get_study_id_from_name(search.name)
        self._states = self._optuna.trial.TrialState

    def claim(self, card: dict[str, Any], leave_out: Collection[int] = ()) -> Claim | None:
        """Claim the first point that is free, or return None if none is.

        Args:
            card: The worker's card.
            leave_out: Points, by index, that this worker does not want.
        """
        while True:
            taken = {*self._standing(self._trials()), *leave_out}
            index = next((index for index in range(len(self.points)) if index not in taken), None)
            if index is None:
                return None
            point = self.points[index]
            trial_id = self._storage.create_new_trial(self._study_id, self._new_trial(index, point, card))
            standing = self._standing(self._trials()).get(index)
            if standing is not None and standing.number == self._storage.get_trial_number_from_id(trial_id):
                return Claim(trial_id, index, point)
            self._storage.set_trial_user_attr(trial_id, "withdrawn", True)  # another worker was first
            self._close(trial_id, self._states.FAIL)

    def beat(self, claim: Claim, count: int) -> None:
        """Show that the worker of a claim is alive."""
        self._storage.set_trial_user_attr(claim.trial_id, "beat", count)

    def finish(self, claim: Claim, value: float, metric: str) -> bool:
        """Record the result; infinite if a run diverged.

        Returns:
            Whether it counts: False if the worker was considered dead and the point was given to another.
        """
        with suppress(_FINISHED):
            self._storage.set_trial_user_attr(claim.trial_id, "metric", metric)
        return self._close(claim.trial_id, self._states.COMPLETE, [value])

    def fail(self, claim: Claim, error: str | None = None) -> bool:
        """Withdraw a claim after an error or an interruption; the point is free again."""
        if error is not None:
            with suppress(_FINISHED):
                self._storage.set_trial_user_attr(claim.trial_id, "error", error)
        return self._close(claim.trial_id, self._states.FAIL)

    def fail_the_dead(self, folder: Path, silences: Silences) -> list[int]:
        """Free the points of dead workers, and return their indices.

        Args:
            folder: Where this machine's workers keep their lock files.
            silences: What this worker has seen of the heartbeats.
        """
        freed = []
        for index, trial in self._standing(self._trials()).items():
            if trial.state != self._states.RUNNING:
                continue
            card = trial.user_attrs.get("worker", {})
            trial_id = self._trial_id(trial)
            if is_gone(card, folder) or silences.too_long(trial_id, trial.user_attrs.get("beat", 0)):
                if self._close(trial_id, self._states.FAIL):
                    freed.append(index)
                if card:
                    remove_card(card, folder)
        return freed

    def unfinished(self) -> list[int]:
        """Return the indices of all points without a result."""
        finished = self._finished(self._trials())
        return [index for index in range(len(self.points)) if index not in finished]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each point that was tried, the best first."""
        trials = self._trials()
        errors = {trial.user_attrs.get("point", -1): trial for trial in trials if "error" in trial.user_attrs}
        tried = errors | self._finished(trials)
        rows = [self._row(index, trial) for index, trial in sorted(tried.items()) if 0 <= index < len(self.points)]
        sign = 1 if self.search.recipe.goal == "min" else -1
        return sorted(rows, key=lambda row: math.inf if row["value"] is None else sign * row["value"])

    def _row(self, index: int, trial: FrozenTrial) -> dict[str, Any]:
        row = {
            "recipe": self.search.recipe.name,
            "method": self.search.label,
            "hyper": dict(self.points[index].hyper),
            "metric": trial.user_attrs.get("metric", self.search.recipe.metric),
            "value": None,
            "seeds": len(self.points[index].configs),
            "outcome": "failed",
        }
        if trial.state == self._states.COMPLETE:
            diverged = trial.value == worst(self.search.recipe)
            row |= {"value": None if diverged else trial.value, "outcome": "diverged" if diverged else "finished"}
        return row

    def _finished(self, trials: Sequence[FrozenTrial]) -> dict[int, FrozenTrial]:
        standing = self._standing(trials)
        return {index: trial for index, trial in standing.items() if trial.state == self._states.COMPLETE}

    def _trials(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._study_id, deepcopy=False)

    def _standing(self, trials: Sequence[FrozenTrial]) -> dict[int, FrozenTrial]:
        """Return for each point that is being tried or finished the trial that counts: the first that did not fail."""
        standing: dict[int, FrozenTrial] = {}
        for trial in sorted(trials, key=lambda trial: trial.number):
            index = trial.user_attrs.get("point")
            if index is not None and index < len(self.points) and trial.state != self._states.FAIL:
                standing.setdefault(index, trial)
        return standing

    def _new_trial(self, index: int, point: Point, card: dict[str, Any]) -> FrozenTrial:
        categories = self._optuna.distributions.CategoricalDistribution
        return self._optuna.create_trial(
            state=self._states.RUNNING,
            params={key: _plain(value) for key, value in point.hyper.items()},
            distributions={key: categories([_plain(v) for v in values]) for key, values in self.search.axes.items()},
            user_attrs={"point": index, "worker": card},
        )

    def _close(self, trial_id: int, state: Any, values: list[float] | None = None) -> bool:
        try:
            return self._storage.set_trial_state_values(trial_id, state, values)
        except _FINISHED:
            return False

    def _trial_id(self, trial: FrozenTrial) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)


def _plain(value: Any) -> Any:
    """Convert a value to what Optuna can store."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str)
