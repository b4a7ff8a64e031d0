"""What is swept: the points of each entry's grid, coarse to fine, each with the runs that judge it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from apo_experiments import renamed
from apo_experiments.errors import UserError
from apo_experiments.methods import METHODS
from apo_experiments.recipe import Entry, Recipe
from apo_experiments.recipes import plan
from apo_experiments.runs import RunConfig
from apo_experiments.sweep.database import address
from apo_experiments.tuning import holds_out


@dataclass(frozen=True)
class Point:
    """One point of a grid: a value for each key, and the runs that judge it, one per seed."""

    hyper: Mapping[str, Any]
    configs: tuple[RunConfig, ...]

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.hyper.items())


@dataclass(frozen=True)
class Search:
    """The grid of one entry of a recipe: the values of each key, and all points in the order of trying them."""

    recipe: Recipe
    label: str
    scale: str
    axes: Mapping[str, tuple[Any, ...]]
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        """The name of the study, the same for the same runs only."""
        points = [
            (_text(renamed.as_first_named(point.hyper)), [config.identity() for config in point.configs])
            for point in self.points
        ]
        content = json.dumps([self.recipe.metric, self.recipe.goal, points])
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        return f"{self.recipe.name}/{self.scale}/{self.label}/{digest}"


@dataclass(frozen=True)
class Order:
    """A sweep over the grids of a recipe's entries: plain data, so that it can be sent to another process.

    Attributes:
        recipe: Name of the recipe.
        root: The folder of all runs.
        labels: Labels of entries with a grid, in any case, or patterns; None for all of those.
        scale: The scale of the runs.
        storage: URL of the database, such as ``postgresql://user@host/name``; None for an SQLite file among the runs.
        data_dir: The folder of the data sets.
        trials: Try this many points of each grid, spread over all of it, instead of the whole grid.
        seeds: How many runs judge a point, by their mean.
        device: Where to train.
        overrides: Options of the task, hyperparameters or ``epochs`` that are set for all points; a key that is set is
            not searched.
        grid: Values to try instead of the recipe's, by key, for all entries whose grid has the key; if none has, one
            more axis for all entries that know it. Values may be strings from the command line.
        deadline: When to stop, as a value of ``time.time()``.
        patience: Seconds without a heartbeat after which a worker on another machine counts as dead.
    """

    recipe: str
    root: Path
    labels: Sequence[str] | None = None
    scale: str = "cpu"
    storage: str | None = None
    data_dir: Path | None = None
    trials: int | None = None
    seeds: int = 1
    device: str = "cpu"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    deadline: float | None = None
    patience: float = 120.0

    @property
    def url(self) -> str:
        """The address of the database."""
        return address(self.storage, self.root)


def searches(recipe: Recipe, order: Order) -> list[Search]:
    """Return the grids to search.

    If the task can hold out a part of the training data for validation, it does.
    """
    scale = order.scale
    if scale not in recipe.scales:
        raise UserError(f"{recipe.name} has no scale {scale!r}: choose one of {', '.join(recipe.scales)}.")
    fixed = dict(order.overrides)
    if holds_out(recipe) and str(fixed.setdefault("validation", True)).lower() not in ("true", "yes", "on", "1"):
        raise UserError(
            f"a sweep of {recipe.name} without validation data would tune on the test data: leave out --set validation."
        )
    found = []
    entries = _entries(recipe, order.labels, order.grid)
    for entry, own in entries:
        # Without repetitions, which the paper's grids have.
        distinct = {key: {_text(value): value for value in values} for key, values in own.items()}
        axes = {key: tuple(values.values()) for key, values in distinct.items() if key not in fixed}
        points, read = [], {}
        for hyper in coarse_to_fine(axes):
            # All entries together, since it is enough if one of them has a key that is set.
            runs = plan(recipe, scale, [entry.label for entry, _ in entries], order.seeds, {**fixed, **hyper})
            mine = [replace(config, device=order.device) for config in runs if config.label == entry.label]
            # The command line has strings, and the plan has read them.
            as_read = {key: mine[0].hyper.get(key, mine[0].options.get(key, value)) for key, value in hyper.items()}
            points.append(Point(as_read, tuple(mine)))
            read |= {(key, _text(hyper[key])): value for key, value in points[-1].hyper.items()}
        axes = {key: tuple(read[key, _text(value)] for value in values) for key, values in axes.items()}
        found.append(Search(recipe, entry.label, scale, axes, tuple(points)))
    return found


def coarse_to_fine(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return all points of a grid: its centre first, then finer and finer halvings of all axes together.

    So the first few points of a large grid are spread over all of it.

    Args:
        axes: The values of each key, in ascending or descending order.

    Example:
        >>> [point["lr"] for point in coarse_to_fine({"lr": [1, 2, 3, 4, 5, 6, 7]})]
        [4, 2, 6, 1, 3, 5, 7]
        >>> coarse_to_fine({"lr": [0.1, 0.2], "damping": [1, 2]})[0]
        {'lr': 0.2, 'damping': 2}
    """
    depths = [_depths(len(values)) for values in axes.values()]
    places = itertools.product(*(range(len(values)) for values in axes.values()))

    def fineness(place: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        levels = [depth[index] for depth, index in zip(depths, place, strict=True)]
        return max(levels, default=0), sum(levels), place

    return [
        {key: values[index] for (key, values), index in zip(axes.items(), place, strict=True)}
        for place in sorted(places, key=fineness)
    ]


def _entries(
    recipe: Recipe, labels: Sequence[str] | None, grid: Mapping[str, Sequence[Any]]
) -> list[tuple[Entry, Mapping[str, Sequence[Any]]]]:
    """Return the entries to search and their grids, with other values where the user has given some."""
    if not recipe.entries or not (grid or any(entry.grid for entry in recipe.entries)):
        raise UserError(f"{recipe.name} has no grids to sweep: use `apo run {recipe.name}`.")
    wanted = {entry.label for entry in recipe.chosen(labels)}
    named = [entry for entry in recipe.entries if entry.label in wanted]
    grids = {entry.label: dict(entry.grid) for entry in named}
    for key, values in grid.items():
        owners = [entry for entry in named if key in entry.grid]
        # If nothing is trained there is no method, but the recipe names its hyperparameters.
        known = {e.label: METHODS[e.method].defaults if e.method in METHODS else e.hyper for e in named}
        owners = owners or [entry for entry in named if key in recipe.defaults or key in known[entry.label]]
        if not owners:
            raise UserError(
                f"--grid was given {key!r}, which no method of {recipe.name} has: see `apo list {recipe.name}`."
            )
        for entry in owners:
            grids[entry.label][key] = tuple(values)
    for entry in named if labels else ():
        if not grids[entry.label]:
            searchable = [other.label for other in recipe.entries if grids.get(other.label) or other.grid]
            raise UserError(f"{entry.label} has no grid in {recipe.name}: choose one of {', '.join(searchable)}.")
    return [(entry, grids[entry.label]) for entry in named if grids[entry.label]]


def _depths(length: int) -> list[int]:
    """Return for each position in a list how often the list has to be halved until it is in the middle."""
    if length == 0:
        return []
    middle = length // 2
    below, above = _depths(middle), _depths(length - middle - 1)
    return [depth + 1 for depth in below] + [0] + [depth + 1 for depth in above]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
