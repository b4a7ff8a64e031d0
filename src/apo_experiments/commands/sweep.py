"""``apo sweep``: tune a recipe's methods over the paper's grids."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from apo_experiments.commands import options
from apo_experiments.commands.tables import show, text_table
from apo_experiments.errors import UserError

_EXAMPLES = """\
  apo sweep uci-protein --method SGDm KFAC
  apo sweep cifar10-lenet --scale paper --storage postgresql://user@host/apo    (the same on any number of machines)
  apo sweep mnist-mlp --trials 5 --jobs 2 --epochs 10
  apo sweep cifar10-lenet --scale paper --epochs 40 --grid lr=0.1,0.03 --jobs 12 --time-limit 540
After Ctrl-C the same command resumes the sweep; finished trials are not repeated."""


def add_to(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = options.add_command(subparsers, "sweep", "tune methods over the paper's grids", _EXAMPLES, execute, True)
    parser.add_argument("recipe", metavar="RECIPE", help="a name from `apo list`")
    options.add_execution_options(parser)
    budget = "stop after this many (default: whole grid)"
    parser.add_argument("--trials", metavar="N", type=options.positive, help=budget)
    values = "try these values of a key instead of the paper's, as in lr=0.1,0.03"
    parser.add_argument("--grid", metavar="KEY=VALUES", nargs="+", action="extend", help=values)


def execute(arguments: argparse.Namespace) -> int:
    """Run the sweep and print its table.

    Returns:
        0, or 1 if a point failed; one that diverged is a result like any other.
    """
    from apo_experiments import sweep
    from apo_experiments.progress import Progress

    deadline = options.begin(arguments)
    (recipe, *others) = options.recipes([arguments.recipe])
    if others:
        raise UserError("`apo sweep` takes one recipe, not all: choose one from `apo list`.")
    root = options.runs_folder(arguments)
    with Progress([recipe], every_seconds=5.0 if arguments.jobs == 1 else 30.0) as display:
        rows = sweep.run(
            recipe,
            arguments.method,
            arguments.scale,
            storage=arguments.storage,
            trials=arguments.trials,
            seeds=arguments.seeds or 1,
            root=root,
            data_dir=arguments.data_dir,
            device=options.device(arguments.device),
            listener=display,
            lanes=display.lane,
            expect=lambda runs: display.expect(len(runs), runs, arguments.jobs),
            jobs=arguments.jobs,
            overrides=options.overrides(arguments),
            grid=options.grid(arguments.grid),
            deadline=deadline,
        )
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
    from apo_experiments.results import set_words

    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("value") is not None and row.get("hyper"):
            best.setdefault(row["method"], row)
    if not best:
        return []
    each = [_command(arguments, [label], set_words(row["hyper"])) for label, row in best.items()]
    together = _command(arguments, list(best), []) + " --best"
    if arguments.storage is not None:
        from apo_experiments.sweep.database import shown

        together += f" --storage {shlex.quote(shown(arguments.storage))}"
    return ["", "To run the best points:", *each, "or, from all sweeps so far:", together]


def _command(arguments: argparse.Namespace, labels: list[str], settings: list[str]) -> str:
    """Return the command that runs methods as they were swept, where and with what the user has set."""
    words = ["apo", "run", arguments.recipe, "--scale", arguments.scale, "--method", *labels]
    settings = settings + (arguments.set or [])
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
