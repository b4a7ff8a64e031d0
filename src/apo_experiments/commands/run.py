"""``apo run``: train a recipe and compare it with the paper."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from apo_experiments.commands import options
from apo_experiments.commands.planned import planned, shared_out
from apo_experiments.commands.tables import show, text_table
from apo_experiments.errors import UserError
from apo_experiments.execution import Assignment, Failure, carried_out
from apo_experiments.progress import Progress
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record, as_result
from apo_experiments.results import Result, figure_text, findings, leader, summarise, value
from apo_experiments.runs import RunConfig
from apo_experiments.train import finished


@dataclass
class _Summary:
    """The outcomes of the runs."""

    records: list[Record] = field(default_factory=list)
    failed: list[RunConfig] = field(default_factory=list)
    exit_code: int = 0


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
    summary = _carry_out(configs, Assignment(root, arguments.data_dir, deadline, chosen_by), recipes, arguments)
    for recipe in recipes:
        records = [record for record in summary.records if record.config.recipe == recipe.name]
        if records:
            show("\n" + comparison(recipe, arguments.scale, summarise(recipe, records)))
    options.write_json(arguments, _json(recipes, summary))
    if summary.records:
        where = "" if arguments.runs is None else f" --runs {arguments.runs}"
        options.say(f"\nThe records are in {root}. `apo report{where}` writes a page with all figures and tables.")
    return summary.exit_code


def _carry_out(
    configs: list[RunConfig], assignment: Assignment, recipes: Sequence[Recipe], arguments: argparse.Namespace
) -> _Summary:
    """Train all runs, even if one of them fails."""
    jobs, left_out, summary = arguments.jobs, set[str](), _Summary()
    with Progress(recipes, every_seconds=5.0 if jobs == 1 else 30.0) as display:
        left = [config for config in configs if finished(config.directory(assignment.root)) is None]
        display.expect(left, jobs, len(configs) - len(left))
        try:
            for config, result in carried_out(configs, jobs, assignment, display.lane, left_out):
                if isinstance(result, Failure):
                    display.failed(config)
                    if result.fixable and len(recipes) == jobs == 1:
                        if arguments.debug:
                            display.message(result.details)
                        raise UserError(result.reason)
                    display.message(_note_failure(config, result, summary, left_out, arguments.debug))
                    continue
                origin = assignment.chosen_by.get((config.recipe, config.label))
                summary.records.append(as_result(result, config.directory(assignment.root), origin))
                if result.diverged:
                    summary.exit_code = summary.exit_code or 1
        except KeyboardInterrupt:
            display.message(f"{len(summary.records)} of {len(configs)} runs are finished")
            raise
    return summary


def _note_failure(config: RunConfig, failure: Failure, summary: _Summary, left_out: set[str], debug: bool) -> str:
    """Note that a run failed, and return what to tell the user."""
    if failure.fixable:
        summary.exit_code = 2
        left_out.add(config.recipe)
        return f"{config.recipe}: {failure.reason}"
    summary.failed.append(config)
    summary.exit_code = summary.exit_code or 1
    hint = "" if debug or not failure.details else "; run with --debug for the traceback"
    details = f"{failure.details}\n" if debug and failure.details else ""
    return f"{details}{config.recipe} {config.label} seed {config.seed} failed with {failure.reason}{hint}"


def _json(recipes: Sequence[Recipe], summary: _Summary) -> list[dict[str, Any]]:
    """Return one entry per run; the value of a run that failed or diverged is null."""
    metrics = {recipe.name: recipe.metric for recipe in recipes}
    papers = {(recipe.name, entry.label): entry.paper for recipe in recipes for entry in recipe.entries}
    finals = [(record.config, value(record, metrics[record.config.recipe])) for record in summary.records]
    rows = [
        (run.recipe, run.label, run.seed, metrics[run.recipe], final, papers.get((run.recipe, run.label)))
        for run, final in [*finals, *((config, None) for config in summary.failed)]
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
            str(len(result.values)) + (f" + {result.diverged} diverged" if result.diverged else ""),
            result.paper_text + ("*" if result is paper_best else " "),
        ]
        for result in run
    ]
    title = f"{recipe.name} ({recipe.paper}), scale {scale}: {recipe.metric}, {recipe.better}"
    title += " (* the best)" if best or paper_best else ""
    table = text_table(["method", "ours ", "seed to seed", "seeds", "paper "], rows, right=[1, 4])
    return "\n".join([title, table, *findings(recipe, scale, run)])
