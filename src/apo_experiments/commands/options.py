"""Options that several commands share, and suggestions for mistyped names.

Written with argparse: click and typer have no options with several values, such as ``--method SGDm KFAC``.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apo_experiments import renamed
from apo_experiments.errors import UserError

if TYPE_CHECKING:
    from apo_experiments.recipe import Recipe

SCALES = ("smoke", "cpu", "paper")


def add_command(
    subparsers: argparse._SubParsersAction,
    name: str,
    summary: str,
    examples: str,
    execute: Callable[[argparse.Namespace], int],
    resumable: bool = False,
) -> argparse.ArgumentParser:
    """Add a command whose help ends with examples, and return its parser."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # SUPPRESS: the default of the main parser is kept, so that --debug may come before or after the command.
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    parser.set_defaults(execute=execute, resumable=resumable)
    return parser


def add_runs_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--runs``."""
    parser.add_argument("--runs", metavar="DIR", type=Path, help="folder of the runs (default: $APO_RUNS, else ./runs)")


def add_execution_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the runs, and where they are trained."""
    add = parser.add_argument
    scales = "smoke: seconds, generated data; cpu: minutes on two cores; paper: as in the paper, on a GPU"
    add("--scale", choices=SCALES, default="cpu", help=f"{scales} (default: cpu)")
    methods = "only these methods (`apo list RECIPE` has them)"
    add("--method", metavar="LABEL", nargs="+", action="extend", help=methods)
    add("--seeds", metavar="N", type=positive, help="number of seeds (default: the recipe's; in sweeps 1)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    add("--data-dir", metavar="DIR", type=Path, help="folder of the data (default: $APO_DATA)")
    settings = "change an option of the task, a hyperparameter or epochs (`apo list RECIPE` has the keys)"
    add("--set", metavar="KEY=VALUE", nargs="+", action="extend", help=settings)
    length = "how long to train; schedules are fractions of it (default: scale's)"
    add("--epochs", metavar="N", type=positive, help=length)
    add("--jobs", metavar="N", type=positive, default=1, help="runs in parallel, on one GPU or the CPU (default: 1)")
    limit = "stop all runs after this time, with checkpoints; the same command resumes them (exit code 3)"
    add("--time-limit", metavar="SECONDS", type=positive, help=limit)
    add("--storage", metavar="URL", help="database of the sweeps (default: an SQLite file among the runs)")
    add("--json", metavar="FILE", type=Path, help="write the values of the table to this file")
    add_runs_option(parser)


def positive(text: str) -> int:
    """Parse a number of at least 1; the type of an option."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def say(sentence: str) -> None:
    """Print something for the user, beside the results; a closed output does not stop the command."""
    with suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)


def runs_folder(arguments: argparse.Namespace) -> Path:
    """Return the folder of all runs: ``--runs``, else ``$APO_RUNS``, else ``./runs``."""
    return (arguments.runs or Path(os.environ.get("APO_RUNS") or "runs")).expanduser()


def device(choice: str) -> str:
    """Return the device that ``--device`` means on this machine."""
    if choice != "auto":
        return choice
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def writable(option: str, path: Path | None) -> None:
    """Raise an error for a file that cannot be written, before hours of work."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} was given {path}, which is a folder: name a file in it.")
    if path.exists() and not path.is_file():  # a pipe or a device
        return
    folder = next(parent for parent in Path(os.path.realpath(path)).parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{option} was given {path}, but nothing can be written in {folder}: name another file.")


def begin(arguments: argparse.Namespace) -> float | None:
    """Check what can be checked before hours of work, and replace former names in ``--set`` and ``--grid``.

    Returns:
        When ``--time-limit`` is reached, as a value of ``time.time()``.
    """
    deadline = None if arguments.time_limit is None else time.time() + arguments.time_limit
    writable("--json", arguments.json)
    words, axes, sentences = renamed.in_words_of_today(arguments.set or (), getattr(arguments, "grid", None) or ())
    arguments.set, arguments.grid = words or None, axes or None
    for sentence in sentences:
        say(f"apo: {sentence}")
    return deadline


def write_json(arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the values of a table to the file that ``--json`` names."""
    from apo_experiments.files import write_atomically

    if arguments.json:
        write_atomically(arguments.json, (json.dumps(rows, indent=1, default=str) + "\n").encode(), "--json")


def overrides(arguments: argparse.Namespace) -> dict[str, str]:
    """Parse ``--set key=value`` and ``--epochs``."""
    found = _pairs(arguments.set, "--set", "--set lr=0.1")
    return found if arguments.epochs is None else {**found, "epochs": str(arguments.epochs)}


def grid(pairs: Sequence[str] | None) -> dict[str, list[str]]:
    """Parse ``--grid key=value,value,...``."""
    example = "--grid lr=0.1,0.03"
    found = {key: text.split(",") for key, text in _pairs(pairs, "--grid", example).items()}
    for key, values in found.items():
        if not all(value.strip() for value in values):
            raise UserError(f"--grid was given no value, or an empty one, for {key!r}: write for example {example}.")
    return found


def _pairs(pairs: Sequence[str] | None, option: str, example: str) -> dict[str, str]:
    found = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise UserError(f"{option} was given {pair!r}: write it as key=value, for example {example}.")
        found[key.strip()] = text.strip()
    return found


def recipes(names: Iterable[str]) -> list[Recipe]:
    """Return the recipes of these names, each once; ``all`` means every recipe, a family all of its own.

    Raises:
        UserError: A name is unknown; the message suggests similar ones.
    """
    from apo_experiments.recipes import FAMILIES, RECIPES

    found: dict[str, Recipe] = {}
    for name in names:
        if name == "all":
            found |= RECIPES
        elif name in RECIPES:
            found[name] = RECIPES[name]
        elif name in FAMILIES:
            found |= {member: RECIPES[member] for member in FAMILIES[name]}
        else:
            raise UserError(
                f"There is no recipe {name!r}{nearest(name, RECIPES)} (`apo list` shows all {len(RECIPES)} of them)."
            )
    return list(found.values())


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a "did you mean" for a mistyped name, or nothing if no name is close."""
    # Underscores for hyphens and capitals are the most common mistakes, so they always match.
    matches = difflib.get_close_matches(name.lower().replace("_", "-"), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
