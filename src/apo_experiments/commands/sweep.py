"""``apo sweep``: tune a recipe's methods over the paper's grids."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from apo_experiments import sweep
from apo_experiments.commands import options
from apo_experiments.commands.tables import show, text_table
from apo_experiments.errors import UserError
from apo_experiments.progress import Progress
from apo_experiments.results import set_words
from apo_experiments.sweep.database import shown


def execute(arguments: argparse.Namespace) -> int:
    """Run the sweep and print its table.

    Returns:
        0, or 1 if a point failed; one that diverged is a result like any other.
    """
    deadline = options.begin(arguments)
    (recipe, *others) = options.recipes([arguments.recipe])
    if others:
        raise UserError("`apo sweep` takes one recipe, not all: choose one from `apo list`.")
    root = options.runs_folder(arguments)
    order = sweep.Order(
        recipe.name,
        root,
        arguments.method,
        arguments.scale,
        arguments.storage,
        arguments.data_dir,
        arguments.trials,
        arguments.seeds or 1,
        options.device(arguments.device),
        options.overrides(arguments),
        options.grid(arguments),
        deadline,
    )
    with Progress([recipe], every_seconds=5.0 if arguments.jobs == 1 else 30.0) as display:
        rows = sweep.run(order, arguments.jobs, display.lane, display.expect)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if columns:
        show("\n" + text_table(columns, [[_cell(row.get(column)) for column in columns] for row in rows]))
    for line in _advice(rows, arguments):
        show(line)
    options.write_json(arguments, rows)
    options.say(f"\nThe records are in {root}.")
    return int(any(row.get("outcome") == "failed" for row in rows))


def _advice(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> list[str]:
    """Return the command that runs each method at its best point; rows come best first."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("value") is not None and row.get("hyper"):
            best.setdefault(row["method"], row)
    if not best:
        return []
    each = [_command(arguments, [label], set_words(row["hyper"])) for label, row in best.items()]
    together = _command(arguments, list(best), []) + " --best"
    if arguments.storage is not None:
        together += f" --storage {shlex.quote(shown(arguments.storage))}"
    return ["", "To run the best points:", *each, "or, from all sweeps so far:", together]


def _command(arguments: argparse.Namespace, labels: list[str], settings: list[str]) -> str:
    """Return the command that runs methods as they were swept, where and with what the user has set."""
    words = ["apo", "run", arguments.recipe, "--scale", arguments.scale, "--method", *labels]
    settings = settings + [f"{key}={text}" for key, text in arguments.set.items()]
    words += ["--set", *settings] if settings else []
    for option in ("epochs", "runs", "data_dir"):
        given = getattr(arguments, option)
        words += [] if given is None else [f"--{option.replace('_', '-')}", str(given)]
    return "  " + shlex.join(words)


def _cell(content: Any) -> str:
    if isinstance(content, dict):
        return " ".join(f"{key}={_cell(part)}" for key, part in content.items())
    if isinstance(content, float):
        return f"{content:.4g}"
    return "-" if content is None else str(content)
