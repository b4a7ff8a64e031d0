"""The runs of a command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from apo_experiments.commands import options
from apo_experiments.errors import UserError

if TYPE_CHECKING:
    from apo_experiments.recipe import Recipe
    from apo_experiments.runs import RunConfig

__all__ = ["Planned", "planned"]


@dataclass
class Planned:
    """The runs of one recipe.

    Attributes:
        configs: The runs.
        chosen_by: What sweeps have found, by recipe and label, where they chose the hyperparameters.
    """

    configs: list[RunConfig]
    chosen_by: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)


def planned(recipe: Recipe, arguments: argparse.Namespace) -> Planned:
    """Plan the runs of a recipe.

    Args:
        recipe: The recipe.
        arguments: Of ``apo run``.

    Raises:
        UserError: A scale, a label or a key is unknown, or no sweep has found anything yet.
    """
    from apo_experiments.recipes import plan

    if arguments.scale not in recipe.scales:
        raise UserError(f"{recipe.name} has no scale {arguments.scale!r}: choose one of {', '.join(recipe.scales)}.")
    overrides = options.overrides(arguments)
    runs = plan(recipe, arguments.scale, labels=arguments.method, seeds=arguments.seeds, overrides=overrides)
    runs = _without_missing_packages(recipe, runs, named=arguments.method or ())
    found = _with_best(recipe, runs, overrides, arguments) if arguments.best or arguments.best_of else Planned(runs)
    place = options.device(arguments.device)
    return replace(
        found, configs=[replace(config, device=place, compiled=arguments.compile) for config in found.configs]
    )


def _without_missing_packages(recipe: Recipe, runs: list[RunConfig], named: Iterable[str]) -> list[RunConfig]:
    """Leave out methods whose package is not installed, and say which; those that the user has named stay."""
    from apo_experiments.availability import missing_package

    wanted = {label.lower() for label in named}
    others = [config for config in runs if config.label.lower() not in wanted]
    missing = {config.label: package for config in others if (package := missing_package(config.method)) is not None}
    for package in dict.fromkeys(missing.values()):
        labels = ", ".join(label for label in missing if missing[label] == package)
        print(f"apo: {recipe.name} runs without {labels}: pip install {package} for them.", file=sys.stderr, flush=True)
    return [config for config in runs if config.label not in missing]


def _with_best(
    recipe: Recipe, runs: list[RunConfig], overrides: Mapping[str, str], arguments: argparse.Namespace
) -> Planned:
    """Put the best hyperparameters into the runs; what the user has set is kept."""
    from apo_experiments import records, tuning
    from apo_experiments.recipes import plan

    (swept,) = options.recipes([arguments.best_of]) if arguments.best_of else [recipe]
    known = records.find(options.runs_folder(arguments), swept.name, arguments.scale)
    found = Planned([])
    for label in dict.fromkeys(config.label for config in runs):
        config = next(config for config in runs if config.label == label)
        choice = tuning.choose(swept, label, arguments.scale, known, config.options)
        # A setting of the task need not be repeated for each method: all methods together know it.
        settings = {**choice.hyper, **{key: text for key, text in overrides.items() if key in _known(config)}}
        found.configs += plan(recipe, arguments.scale, labels=[label], seeds=arguments.seeds, overrides=settings)
        found.chosen_by[recipe.name, label] = choice.origin
    return found


def _known(config: RunConfig) -> set[str]:
    return {"epochs", *config.hyper, *config.options}
