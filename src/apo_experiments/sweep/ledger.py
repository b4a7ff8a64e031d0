"""The ledger of a search: which worker tries which point of the grid, and the results.

It is an Optuna study. A trial is a claim on a point, and claims need no lock: the database numbers the trials of a
study consecutively, and of several claims on one point the one with the lowest number wins. A worker that has made a
claim looks for older ones and withdraws if one of them has not failed. So a point is never tried twice at the same
time, and never again once it is finished. A point whose trials have all failed can be claimed again. (Optuna's own
samplers and its queue of trials may hand one point to two workers.)
"""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from apo_experiments import provenance
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig
from apo_experiments.sweep.database import exists, open_database, reachable
from apo_experiments.sweep.grid import Point, Search
from apo_experiments.sweep.presence import is_gone
from apo_experiments.tuning import worst

#: What Optuna raises on a change to a finished trial; it has a separate subclass since version 4.0.
_FINISHED = RuntimeError


@dataclass(frozen=True)
class Claim:
    """The right to try a point: the trial in the database, and the place of the point in the order of the search."""

    trial_id: int
    index: int
    point: Point


@final
class Ledger:
    """What is known about a search, or its first ``trials`` points, for all workers on all machines."""

    def __init__(self, search: Search, storage: RDBStorage, trials: int | None = None) -> None:
        self.search = search
        self.points = search.points[:trials]
        self.failed = set[int]()  # the points whose runs have failed with an error in this process
        self._storage = storage
        self._beats: dict[int, tuple[int, float]] = {}  # by trial: the last heartbeat, and when it was new here
        direction = "minimize" if search.recipe.goal == "min" else "maximize"
        optuna.create_study(storage=storage, study_name=search.name, direction=direction, load_if_exists=True)
        self._study_id = storage.get_study_id_from_name(search.name)
        configs = search.points[0].configs
        if configs and "runs" not in storage.get_study_user_attrs(self._study_id):
            # What a machine without the records needs to know about the runs; see `tried`.
            grid = [dict(point.hyper) for point in search.points]
            about = {"config": asdict(configs[0]), "grid": grid, "seeds": len(configs), "command": provenance.command()}
            storage.set_study_user_attr(self._study_id, "runs", json.loads(json.dumps(about, default=str)))

    def claim(self, card: dict[str, Any]) -> Claim | None:
        """Claim the first point that is free and has not failed here, for the worker with this card."""
        choices = optuna.distributions.CategoricalDistribution
        while True:
            taken = {*self._standing(), *self.failed}
            index = next((index for index in range(len(self.points)) if index not in taken), None)
            if index is None:
                return None
            point = self.points[index]
            trial = optuna.create_trial(
                state=TrialState.RUNNING,
                params={key: _plain(value) for key, value in point.hyper.items()},
                distributions={key: choices([*map(_plain, values)]) for key, values in self.search.axes.items()},
                user_attrs={"point": index, "worker": card},
            )
            trial_id = self._storage.create_new_trial(self._study_id, trial)
            standing = self._standing().get(index)
            if standing is not None and standing.number == self._storage.get_trial_number_from_id(trial_id):
                return Claim(trial_id, index, point)
            self._storage.set_trial_user_attr(trial_id, "withdrawn", True)  # another worker was first
            self._close(trial_id, TrialState.FAIL)

    def beat(self, claim: Claim, count: int) -> None:
        """Show that the worker of a claim is alive."""
        self._storage.set_trial_user_attr(claim.trial_id, "beat", count)

    def finish(self, claim: Claim, value: float, metric: str) -> bool:
        """Record the result, which is infinite if a run diverged.

        Returns:
            Whether it counts: False if the worker was considered dead and the point was given to another.
        """
        return self._close(claim.trial_id, TrialState.COMPLETE, [value], metric=metric)

    def fail(self, claim: Claim, error: str | None = None) -> bool:
        """Withdraw a claim after an error or an interruption; the point is free again, after an error for others."""
        if error is not None:
            self.failed.add(claim.index)
        return self._close(claim.trial_id, TrialState.FAIL, error=error)

    def fail_the_dead(self, folder: Path, patience: float) -> list[int]:
        """Free the points of dead workers, and return their indices.

        Args:
            folder: Where this machine's workers keep their lock files.
            patience: After so many seconds without a new heartbeat a worker counts as dead. The first look at a trial
                starts the clock, which is this process's own.
        """
        freed = []
        for index, trial in self._standing().items():
            if trial.state != TrialState.RUNNING:
                continue
            now, beat, card = time.monotonic(), trial.user_attrs.get("beat", 0), trial.user_attrs.get("worker", {})
            last, since = self._beats.get(trial.number, (None, now))
            if beat != last:
                self._beats[trial.number] = beat, now
            silent = beat == last and now - since > patience
            if silent or is_gone(card, folder):
                trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)
                if self._close(trial_id, TrialState.FAIL):
                    freed.append(index)
                if card:
                    with suppress(OSError):
                        (folder / card["name"]).unlink(missing_ok=True)
        return freed

    def unfinished(self) -> set[int]:
        """Return the indices of all points without a result."""
        done = {index for index, trial in self._standing().items() if trial.state == TrialState.COMPLETE}
        return set(range(len(self.points))) - done

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each point that was tried, the best first."""
        tried = {trial.user_attrs.get("point", -1): trial for trial in self._trials() if "error" in trial.user_attrs}
        tried |= {i: trial for i, trial in self._standing().items() if trial.state == TrialState.COMPLETE}
        rows = []
        for index, trial in sorted(tried.items()):
            if not 0 <= index < len(self.points):
                continue
            finished = trial.state == TrialState.COMPLETE
            value = trial.value if finished and trial.value != worst(self.search.recipe) else None
            rows.append(
                {
                    "recipe": self.search.recipe.name,
                    "method": self.search.label,
                    "hyper": dict(self.points[index].hyper),
                    "metric": trial.user_attrs.get("metric", self.search.recipe.metric),
                    "value": value,
                    "seeds": len(self.points[index].configs),
                    "outcome": "failed" if not finished else "diverged" if value is None else "finished",
                }
            )
        sign = 1 if self.search.recipe.goal == "min" else -1
        return sorted(rows, key=lambda row: math.inf if row["value"] is None else sign * row["value"])

    def _trials(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._study_id, deepcopy=False)

    def _standing(self) -> dict[int, FrozenTrial]:
        """Return for each point that is being tried or finished the trial that counts: the first that did not fail."""
        standing: dict[int, FrozenTrial] = {}
        for trial in sorted(self._trials(), key=lambda trial: trial.number):
            index = trial.user_attrs.get("point")
            if index is not None and index < len(self.points) and trial.state != TrialState.FAIL:
                standing.setdefault(index, trial)
        return standing

    def _close(self, trial_id: int, state: Any, values: list[float] | None = None, **attributes: str | None) -> bool:
        with suppress(_FINISHED):
            for key, text in attributes.items():
                if text is not None:
                    self._storage.set_trial_user_attr(trial_id, key, text)
            return self._storage.set_trial_state_values(trial_id, state, values)
        return False


def tried(recipe: str, scale: str, url: str) -> list[Record]:
    """Return what all sweeps of a recipe in a database have found, as records without curves.

    There is one record for each point: the mean over its seeds.
    """
    if not exists(url):  # opening would create it
        return []
    found = []
    with reachable(url):
        storage = open_database(url)
        for study in storage.get_all_studies():
            about = study.user_attrs.get("runs")
            if about is None or not study.study_name.startswith(f"{recipe}/{scale}/"):
                continue
            config, header = about["config"], {"sweep": {"command": about["command"]}, "seeds": about["seeds"]}
            for trial in storage.get_all_trials(study._study_id, deepcopy=False):
                if trial.state != TrialState.COMPLETE or "point" not in trial.user_attrs:
                    continue
                point = about["grid"][trial.user_attrs["point"]]
                both = {
                    part: {key: point.get(key, value) for key, value in config[part].items()}
                    for part in ("hyper", "options")
                }
                value = trial.value if trial.value is not None and math.isfinite(trial.value) else None
                summary = {"metrics": {trial.user_attrs["metric"]: value}}
                found.append(Record(RunConfig.from_record({**config, **both}), header, [], summary))
    return found


def _plain(value: Any) -> Any:
    """Convert a value to what Optuna can store."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str)
