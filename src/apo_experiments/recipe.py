"""Recipes: one figure or table of the paper each, at three scales."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from apo_experiments.errors import UserError
from apo_experiments.problem import Problem

SCALES = ("smoke", "cpu", "paper")

#: The :attr:`Recipe.paper` of a recipe that the paper does not have.
NOT_IN_PAPER = "not in the paper"

#: Options, setting and hyperparameters to the rows of a record and its final metrics.
Compute = Callable[[Mapping[str, Any], "Setting", Mapping[str, Any]], tuple[list[dict[str, Any]], dict[str, float]]]


@dataclass(frozen=True)
class Setting:
    """Where a problem is built: what a task's ``build`` function receives beside its options."""

    seed: int
    device: torch.device
    data_dir: Path | None


@dataclass(frozen=True)
class Scale:
    """One size of a recipe.

    Attributes:
        epochs: How long to train.
        seeds: How many seeds by default.
        minutes: Roughly how long all methods and seeds take, on two cores (smoke, cpu) or one GPU (paper).
        options: Options of the task at this scale (sizes of data and network, ``data="generated"`` for smoke, ...).
        hyper: Hyperparameters that differ at this scale, by label of the entry: they overrule the entry's own.
    """

    epochs: int
    seeds: int
    minutes: float
    options: Mapping[str, Any] = field(default_factory=dict)
    hyper: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """One method in a recipe: a line of its figure, a cell of its table.

    Attributes:
        label: Name within the recipe, what ``--method`` takes.
        method: Name in :data:`apo_experiments.methods.METHODS`.
        hyper: Hyperparameters in this recipe (chosen by the sweep, or the paper's).
        grid: The paper's grid for ``apo sweep``.
        options: Options of the task that differ for this entry (an ablation of the problem, 16-bit, ...).
        paper: The paper's figure for the recipe's metric, if it gives one.
    """

    label: str
    method: str
    hyper: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    paper: float | None = None


@dataclass(frozen=True)
class Recipe:
    """One experiment of the paper.

    Attributes:
        name: What the command line calls it.
        title: One line on what it shows.
        paper: Which figure or table it repeats.
        task: Builds the problem from its options.
        defaults: All options of the task and their default values; ``--set`` accepts these keys too.
        data: Names of the data sets it needs at scales other than smoke.
        scales: Its three sizes.
        entries: Its methods.
        metric: The metric that the table shows, and ``goal`` whether "min" or "max" is better.
        figure: Name of the figure in :mod:`apo_experiments.figures`.
        notes: What the paper claims, and what a reader should know.
        compute: For a recipe that is not a training run (Figure 1's exact updates): returns the rows of the record and
            the final metrics from the options, the setting and the entry's hyperparameters. ``task`` is not called
            then.
    """

    name: str
    title: str
    paper: str
    task: Callable[[Mapping[str, Any], Setting], Problem] | None
    defaults: Mapping[str, Any]
    data: tuple[str, ...]
    scales: Mapping[str, Scale]
    entries: tuple[Entry, ...]
    metric: str
    goal: str
    figure: str = "curves"
    notes: str = ""
    compute: Compute | None = None

    @property
    def best(self) -> Callable[..., Any]:
        """Python's ``min`` or ``max``, by the goal."""
        return min if self.goal == "min" else max

    @property
    def better(self) -> str:
        """The goal in words."""
        return "less is better" if self.goal == "min" else "more is better"

    def worse(self, one: float, other: float) -> bool:
        """Return whether one value of the metric is worse than another."""
        return one > other if self.goal == "min" else one < other

    def chosen(self, labels: Iterable[str] | None) -> list[Entry]:
        """Return the entries of these labels, in any case, or patterns such as ``SGDm-cosine-*``; None for all."""
        if labels is None:
            return list(self.entries)
        found = dict[str, Entry]()
        for label in labels:
            matching = self.matching(label)
            if not matching:
                known = ", ".join(entry.label for entry in self.entries)
                raise UserError(f"{self.name} has no method {label!r}: choose one of {known}.")
            found |= {entry.label: entry for entry in matching}
        return list(found.values())

    def matching(self, label: str) -> list[Entry]:
        """Return the entry of this label, in any case, or those that fit the pattern."""
        by_name = {entry.label.lower(): entry for entry in self.entries}
        name = label.lower()
        return [by_name[found] for found in ([name] if name in by_name else fnmatch.filter(by_name, name))]


def by_name(*recipes: Recipe) -> dict[str, Recipe]:
    """Return recipes by their names."""
    return {recipe.name: recipe for recipe in recipes}
