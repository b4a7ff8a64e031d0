"""``apo run``: train a recipe and compare it with the paper."""

from __future__ import annotations

import argparse
import json
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apo_experiments.commands import options
from apo_experiments.commands.tables import comparison
from apo_experiments.errors import UserError

if TYPE_CHECKING:
    from apo_experiments.progress import Display
    from apo_experiments.recipe import Recipe
    from apo_experiments.records import Record
    from apo_experiments.runs import RunConfig

__all__ = ["add_to", "execute"]

_EXAMPLES = """\
  apo run rosenbrock                              minutes on two cores
  apo run all --scale smoke                       every recipe, in seconds each
  apo run uci-protein --scale paper --device cuda
  apo run mnist-mlp --method SGDm-APO --seeds 3 --set lr=0.01
Ctrl-C leaves a run that the same command continues; a run that is finished is not repeated."""


def add_to(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = options.add_command(subparsers, "run", "train recipes and compare them with the paper", _EXAMPLES)
    parser.add_argument("recipes", metavar="RECIPE", nargs="+", help="names from `apo list`, or all")
    options.add_execution_options(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the final figures to this file")
    parser.set_defaults(execute=execute, resumable=True)


@dataclass
class _Outcome:
    """What came of the runs."""

    records: list[Record] = field(default_factory=list)
    failed: list[RunConfig] = field(default_factory=list)
    exit_code: int = 0


def execute(arguments: argparse.Namespace) -> int:
    """Carry out all runs, print tables, write the JSON summary.

    Returns:
        0; 1 if a run failed or diverged; 2 if something is missing that the user can mend.
    """
    from apo_experiments import progress

    recipes = options.recipes(arguments.recipes)
    # All plans come before the first run: a mistyped key must not show after an hour.
    plans = {recipe.name: _plan(recipe, arguments) for recipe in recipes}
    count = sum(len(configs) for configs in plans.values())
    outcome = _Outcome()
    with progress.display(count, {recipe.name: recipe.metric for recipe in recipes}) as display:
        for recipe in recipes:
            try:
                _run_all(plans[recipe.name], outcome, display, arguments)
            except UserError as error:
                if len(recipes) == 1:
                    raise
                display.message(f"{recipe.name}: {error}")
                outcome.exit_code = 2
    _print_tables(recipes, outcome, arguments.scale)
    if arguments.json:
        from apo_experiments.files import write_atomically

        content = json.dumps(_json(recipes, outcome), indent=1, allow_nan=False) + "\n"
        write_atomically(arguments.json, content.encode())
    return outcome.exit_code


def _plan(recipe: Recipe, arguments: argparse.Namespace) -> list[RunConfig]:
    from apo_experiments.recipes import plan

    if arguments.scale not in recipe.scales:
        raise UserError(f"{recipe.name} has no scale {arguments.scale!r}: choose one of {', '.join(recipe.scales)}.")
    configs = plan(
        recipe,
        arguments.scale,
        labels=arguments.method,
        seeds=arguments.seeds,
        overrides=options.overrides(arguments.set),
    )
    place = options.device(arguments.device)
    return [replace(config, device=place) for config in configs]


def _run_all(configs: list[RunConfig], outcome: _Outcome, display: Display, arguments: argparse.Namespace) -> None:
    """Carry out the runs of one recipe. One that fails does not keep the others from their turn."""
    from apo_experiments.train import train

    root = options.runs_folder(arguments)
    for config in configs:
        try:
            record = train(config, root=root, data_dir=arguments.data_dir, listener=display)
        except UserError:
            raise
        except Exception as error:
            if arguments.debug:
                display.message(traceback.format_exc())
            hint = "" if arguments.debug else "; run with --debug for the traceback"
            display.message(
                f"{config.recipe} {config.label} seed {config.seed} failed with {type(error).__name__}: {error}{hint}"
            )
            outcome.failed.append(config)
            outcome.exit_code = outcome.exit_code or 1
            continue
        outcome.records.append(record)
        if record.summary and record.summary.get("diverged"):
            outcome.exit_code = outcome.exit_code or 1


def _print_tables(recipes: list[Recipe], outcome: _Outcome, scale: str) -> None:
    from apo_experiments.results import summarise

    for recipe in recipes:
        records = [record for record in outcome.records if record.config.recipe == recipe.name]
        if records:
            print("\n" + comparison(recipe, scale, summarise(recipe, records)))


def _json(recipes: list[Recipe], outcome: _Outcome) -> list[dict[str, Any]]:
    """Return one entry a run; the value of a run that failed or diverged is null."""
    from apo_experiments.results import value

    by_name = {recipe.name: recipe for recipe in recipes}
    finals = [(record.config, value(record, by_name[record.config.recipe].metric)) for record in outcome.records]
    entries = []
    for config, final in [*finals, *((config, None) for config in outcome.failed)]:
        recipe = by_name[config.recipe]
        paper = next((entry.paper for entry in recipe.entries if entry.label == config.label), None)
        entries.append(
            {
                "recipe": config.recipe,
                "method": config.label,
                "seed": config.seed,
                "metric": recipe.metric,
                "value": final,
                "paper": paper,
            }
        )
    return entries
