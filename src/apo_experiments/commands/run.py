"""``apo run``: plan the runs of recipes, train them, and compare them with the paper."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from apo_experiments import records, tuning
from apo_experiments.commands import options
from apo_experiments.commands.tables import show, text_table
from apo_experiments.errors import UserError
from apo_experiments.execution import Assignment, Failure, Outcome, carried_out
from apo_experiments.methods import METHODS
from apo_experiments.progress import Progress, counted
from apo_experiments.recipe import Recipe
from apo_experiments.recipes import plan
from apo_experiments.records import Record, as_result
from apo_experiments.results import Result, figure_text, findings, leader, set_words, summarise, value
from apo_experiments.runs import RunConfig
from apo_experiments.train import finished

#: What sweeps have found, by recipe and label, where they chose the hyperparameters.
ChosenBy = dict[tuple[str, str], Mapping[str, Any]]


def execute(arguments: argparse.Namespace) -> int:
    """Carry out all runs, print tables, write the JSON summary.

    Returns:
        0; 1 if a run failed or diverged; 2 if something is missing that the user can fix.
    """
    if arguments.storage and not (arguments.best or arguments.best_of):
        raise UserError("--storage names the database of the sweeps that --best chooses from: add --best.")
    deadline = options.begin(arguments)
    recipes, root = options.recipes(arguments.recipes), options.runs_folder(arguments)
    # Plan everything before the first run, so that a mistyped key shows up at once.
    plans = [planned(recipe, arguments, labels) for recipe, labels in shared_out(recipes, arguments.method)]
    configs = [config for own, _ in plans for config in own]
    chosen_by = {key: origin for _, origins in plans for key, origin in origins.items()}
    outcomes = _carry_out(configs, Assignment(root, arguments.data_dir, deadline, chosen_by), recipes, arguments)
    done = [result for _, result in outcomes if isinstance(result, Record)]
    failures = [(config, result) for config, result in outcomes if isinstance(result, Failure)]
    for recipe in recipes:
        own = [record for record in done if record.config.recipe == recipe.name]
        if own:
            show("\n" + comparison(recipe, arguments.scale, summarise(recipe, own)))
    options.write_json(arguments, _json(recipes, done, [config for config, failure in failures if not failure.fixable]))
    if done:
        where = "" if arguments.runs is None else f" --runs {arguments.runs}"
        options.say(f"\nThe records are in {root}. `apo report{where}` writes a page with all figures and tables.")
    if any(failure.fixable for _, failure in failures):
        return 2
    return int(bool(failures) or any(record.diverged for record in done))


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
    # Methods whose package is not installed are left out, but not those that the user has named.
    named = {label.lower() for label in labels or ()}
    others = [config for config in runs if config.label.lower() not in named and config.method in METHODS]
    missing = {config.label: package for config in others if (package := METHODS[config.method].missing) is not None}
    for package, absent in records.grouped(missing, missing.__getitem__).items():
        options.say(f"apo: {recipe.name} runs without {', '.join(absent)}: pip install {package} for them.")
    runs = [config for config in runs if config.label not in missing]
    chosen_by: ChosenBy = {}
    if arguments.best or arguments.best_of:
        runs, chosen_by = _with_best(recipe, runs, overrides, arguments)
    place = options.device(arguments.device)
    return [replace(config, device=place, compiled=arguments.compile) for config in runs], chosen_by


def _with_best(
    recipe: Recipe, runs: list[RunConfig], overrides: Mapping[str, str], arguments: argparse.Namespace
) -> tuple[list[RunConfig], ChosenBy]:
    """Put the best hyperparameters into the runs, and say where they come from; what the user has set is kept."""
    (swept,) = options.recipes([arguments.best_of]) if arguments.best_of else [recipe]
    root, scale = options.runs_folder(arguments), arguments.scale
    here = records.find(root, swept.name, scale)
    configs: list[RunConfig] = []
    chosen_by: ChosenBy = {}
    for label in dict.fromkeys(run.label for run in runs):
        config = next(run for run in runs if run.label == label)
        known, where, storage = here, str(root), arguments.storage
        if storage is None and (storage := tuning.storage_of(swept, label, scale, here)):
            options.say(f"{swept.name} {label} was swept in {storage}; --storage none takes the records here instead")
            if ":***@" in storage:
                raise UserError(f"records contain no passwords: give the address {storage} with --storage.")
        if storage not in (None, "none"):
            from apo_experiments import sweep  # which imports Optuna

            known, where = sweep.tried(swept.name, scale, sweep.address(storage, root)), storage.rpartition("@")[2]
        hyper, origin = tuning.choose(swept, label, scale, known, config.options, where)
        tried = f"{counted(origin['points'], 'point')} of {counted(origin['epochs'], 'epoch')}"
        settings = " ".join(set_words(origin["hyper"])) or "the only point"
        result = f"{origin['metric']} {figure_text(origin['value'])}, the best of {tried} in {where}"
        options.say(f"{swept.name} {label}: {settings} ({result})")
        # A setting of the task need not be repeated for each method: all methods together know it.
        keys = {"epochs", *config.hyper, *config.options}
        changes = {**hyper, **{key: text for key, text in overrides.items() if key in keys}}
        configs += plan(recipe, scale, labels=[label], seeds=arguments.seeds, overrides=changes)
        chosen_by[recipe.name, label] = origin
    return configs, chosen_by


def _carry_out(
    configs: list[RunConfig], assignment: Assignment, recipes: Sequence[Recipe], arguments: argparse.Namespace
) -> list[Outcome]:
    """Train all runs, even if one of them fails; but not the other runs of a recipe that the user has to fix."""
    jobs, left_out, outcomes = arguments.jobs, set[str](), list[Outcome]()
    with Progress(recipes, every_seconds=5.0 if jobs == 1 else 30.0) as display:
        left = [config for config in configs if finished(config.directory(assignment.root)) is None]
        display.expect(left, jobs, len(configs) - len(left))
        try:
            for config, result in carried_out(configs, jobs, assignment, display.lane, left_out):
                if isinstance(result, Record):
                    origin = assignment.chosen_by.get((config.recipe, config.label))
                    outcomes.append((config, as_result(result, config.directory(assignment.root), origin)))
                    continue
                outcomes.append((config, result))
                display.failed(config)
                if arguments.debug and result.details:
                    display.message(result.details)
                if not result.fixable:
                    hint = "" if arguments.debug or not result.details else "; run with --debug for the traceback"
                    who = f"{config.recipe} {config.label} seed {config.seed}"
                    display.message(f"{who} failed with {result.reason}{hint}")
                elif len(recipes) == jobs == 1:
                    raise UserError(result.reason)
                else:
                    left_out.add(config.recipe)
                    display.message(f"{config.recipe}: {result.reason}")
        except KeyboardInterrupt:
            done = sum(isinstance(result, Record) for _, result in outcomes)
            display.message(f"{done} of {len(configs)} runs are finished")
            raise
    return outcomes


def _json(recipes: Sequence[Recipe], done: Sequence[Record], failed: Sequence[RunConfig]) -> list[dict[str, Any]]:
    """Return one entry per run; the value of a run that failed or diverged is null."""
    metrics = {recipe.name: recipe.metric for recipe in recipes}
    papers = {(recipe.name, entry.label): entry.paper for recipe in recipes for entry in recipe.entries}
    finals = [(record.config, value(record, metrics[record.config.recipe])) for record in done]
    rows = [
        (run.recipe, run.label, run.seed, metrics[run.recipe], final, papers.get((run.recipe, run.label)))
        for run, final in [*finals, *((config, None) for config in failed)]
    ]
    return [dict(zip(("recipe", "method", "seed", "metric", "value", "paper"), row, strict=True)) for row in rows]


def comparison(recipe: Recipe, scale: str, results: Sequence[Result]) -> str:
    """Return the table of a recipe: the paper's figures and ours, the best of each with a star.

    Example:
        >>> recipe = Recipe("tiny", "", "Table 2", None, {}, (), {}, (), metric="accuracy", goal="max")
        >>> print(comparison(recipe, "cpu", [Result("SGDm", (75.0, 76.0), paper=75.73), Result("APO", (77.0,))]))
        tiny (Table 2), scale cpu: accuracy, more is better (* the best)
        method   ours   seed to seed    seeds  paper
        ------  ------  --------------  -----  ------
        SGDm    75.50   75.00 to 76.00  2      75.73*
        APO     77.00*                  1           -
        In front here: APO with 77.00; in the paper: SGDm with 75.73.
    """
    best, paper_best = leader(recipe, results), leader(recipe, results, paper=True)
    run = [result for result in results if result.values or result.diverged or result.unfinished]
    rows = [
        [
            result.name,
            figure_text(result.mean) + ("*" if result is best else " "),
            result.spread(),
            result.seeds,
            result.paper_text + ("*" if result is paper_best else " "),
        ]
        for result in run
    ]
    title = f"{recipe.name} ({recipe.paper}), scale {scale}: {recipe.metric}, {recipe.better}"
    title += " (* the best)" if best or paper_best else ""
    table = text_table(["method", "ours ", "seed to seed", "seeds", "paper "], rows, right=[1, 4])
    return "\n".join([title, table, *findings(recipe, scale, run)])
