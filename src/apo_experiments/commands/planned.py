"""The runs of a command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from apo_experiments import records, tuning
from apo_experiments.commands import options
from apo_experiments.errors import UserError
from apo_experiments.methods import METHODS
from apo_experiments.progress import counted
from apo_experiments.recipe import Recipe
from apo_experiments.recipes import plan
from apo_experiments.records import Record
from apo_experiments.results import figure_text, set_words
from apo_experiments.runs import RunConfig

#: What sweeps have found, by recipe and label, where they chose the hyperparameters.
ChosenBy = dict[tuple[str, str], Mapping[str, Any]]


def shared_out(recipes: Sequence[Recipe], labels: Sequence[str] | None) -> list[tuple[Recipe, Sequence[str] | None]]:
    """Return each recipe with those of the labels that it has; a label that no recipe has stays, for the message.

    A family such as ``no-tuning`` has methods that fit only some of its tasks.

    Args:
        recipes: The recipes.
        labels: Labels or patterns; None for all methods.
    """
    if labels is None:
        return [(recipe, None) for recipe in recipes]
    known = {label for label in labels if any(recipe.matching(label) for recipe in recipes)}
    shares = [
        (recipe, [label for label in labels if label not in known or recipe.matching(label)]) for recipe in recipes
    ]
    for recipe, found in shares:
        for label in dict.fromkeys(labels):
            if label not in found:
                options.say(f"{recipe.name} runs without {label}, which it does not have.")
    return [(recipe, found) for recipe, found in shares if found]


def planned(
    recipe: Recipe, arguments: argparse.Namespace, labels: Sequence[str] | None
) -> tuple[list[RunConfig], ChosenBy]:
    """Plan the runs of a recipe, and say what chose their hyperparameters.

    Args:
        recipe: The recipe.
        arguments: Of ``apo run``.
        labels: Labels of methods or patterns; None for all methods.
    """
    overrides = options.overrides(arguments)
    runs = plan(recipe, arguments.scale, labels=labels, seeds=arguments.seeds, overrides=overrides)
    runs = _without_missing_packages(recipe, runs, named=labels or ())
    chosen_by: ChosenBy = {}
    if arguments.best or arguments.best_of:
        runs, chosen_by = _with_best(recipe, runs, overrides, arguments)
    place = options.device(arguments.device)
    return [replace(config, device=place, compiled=arguments.compile) for config in runs], chosen_by


def _without_missing_packages(recipe: Recipe, runs: list[RunConfig], named: Iterable[str]) -> list[RunConfig]:
    """Leave out methods whose package is not installed, and say which; those that the user has named stay."""
    wanted = {label.lower() for label in named}
    others = [config for config in runs if config.label.lower() not in wanted and config.method in METHODS]
    missing = {config.label: package for config in others if (package := METHODS[config.method].missing) is not None}
    for package in dict.fromkeys(missing.values()):
        labels = ", ".join(label for label in missing if missing[label] == package)
        options.say(f"apo: {recipe.name} runs without {labels}: pip install {package} for them.")
    return [config for config in runs if config.label not in missing]


def _with_best(
    recipe: Recipe, runs: list[RunConfig], overrides: Mapping[str, str], arguments: argparse.Namespace
) -> tuple[list[RunConfig], ChosenBy]:
    """Put the best hyperparameters into the runs; what the user has set is kept."""
    (swept,) = options.recipes([arguments.best_of]) if arguments.best_of else [recipe]
    known = records.find(options.runs_folder(arguments), swept.name, arguments.scale)
    configs: list[RunConfig] = []
    chosen_by: ChosenBy = {}
    for label in dict.fromkeys(config.label for config in runs):
        config = next(config for config in runs if config.label == label)
        hyper, origin = _best(swept, config, known, arguments)
        # A setting of the task need not be repeated for each method: all methods together know it.
        keys = {"epochs", *config.hyper, *config.options}
        settings = {**hyper, **{key: text for key, text in overrides.items() if key in keys}}
        configs += plan(recipe, arguments.scale, labels=[label], seeds=arguments.seeds, overrides=settings)
        chosen_by[recipe.name, label] = origin
    return configs, chosen_by


def _best(
    swept: Recipe, config: RunConfig, known: list[Record], arguments: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the best hyperparameters for a method and where they come from, and print that."""
    root = options.runs_folder(arguments)
    where, storage = str(root), arguments.storage
    if storage is None and (storage := tuning.storage_of(swept, config.label, arguments.scale, known)):
        options.say(
            f"{swept.name} {config.label} was swept in {storage}; --storage none takes the records here instead"
        )
        if ":***@" in storage:
            raise UserError(f"records contain no passwords: give the address {storage} with --storage.")
    if storage not in (None, "none"):
        from apo_experiments import sweep  # which imports Optuna

        url = sweep.address(storage, root)
        known, where = sweep.tried(swept.name, arguments.scale, url), storage.rpartition("@")[2]
    hyper, origin = tuning.choose(swept, config.label, arguments.scale, known, config.options, where)
    runs = f"{counted(origin['points'], 'point')} of {counted(origin['epochs'], 'epoch')}"
    settings = " ".join(set_words(origin["hyper"])) or "the only point"
    result = f"{origin['metric']} {figure_text(origin['value'])}, the best of {runs} in {where}"
    options.say(f"{swept.name} {config.label}: {settings} ({result})")
    return hyper, origin
