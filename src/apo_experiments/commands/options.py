"""What several commands have in common: options, and names that may be mistyped."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from apo_experiments.errors import UserError

if TYPE_CHECKING:
    from apo_experiments.recipe import Recipe

__all__ = [
    "add_command",
    "add_execution_options",
    "add_runs_option",
    "device",
    "nearest",
    "overrides",
    "recipes",
    "runs_folder",
]

SCALES = ("smoke", "cpu", "paper")


def add_command(
    subparsers: argparse._SubParsersAction, name: str, summary: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command whose help ends with examples, and return its parser."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # SUPPRESS: the default of the main parser stands, so that --debug may come before or after the command.
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    return parser


def add_runs_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--runs``."""
    parser.add_argument("--runs", metavar="DIR", type=Path, help="folder of the runs (default: $APO_RUNS, else ./runs)")


def add_execution_options(parser: argparse.ArgumentParser) -> None:
    """Add what decides which runs are carried out, and where."""
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="cpu",
        help="smoke: seconds, generated data; cpu: minutes on two cores; paper: as in the paper, on a GPU "
        "(default: cpu)",
    )
    parser.add_argument(
        "--method", metavar="LABEL", nargs="+", action="extend", help="only these methods (`apo list RECIPE` has them)"
    )
    parser.add_argument("--seeds", metavar="N", type=positive, help="number of seeds (default: the recipe's)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    parser.add_argument("--data-dir", metavar="DIR", type=Path, help="folder of the data (default: $APO_DATA)")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        help="change an option of the task, a hyperparameter or epochs (`apo list RECIPE` has the keys)",
    )
    add_runs_option(parser)


def positive(text: str) -> int:
    """Read a number from 1 on; the type of an option.

    Example:
        >>> positive("3")
        3
    """
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text!r}")
    return number


def runs_folder(arguments: argparse.Namespace) -> Path:
    """Return the folder of all runs: ``--runs``, else ``$APO_RUNS``, else ``./runs``.

    Example:
        >>> runs_folder(argparse.Namespace(runs=Path("elsewhere"))).name
        'elsewhere'
    """
    return (arguments.runs or Path(os.environ.get("APO_RUNS") or "runs")).expanduser()


def device(choice: str) -> str:
    """Return the device that ``--device`` means on this machine.

    Example:
        >>> device("cpu")
        'cpu'
    """
    if choice != "auto":
        return choice
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def overrides(pairs: Sequence[str] | None) -> dict[str, str]:
    """Read ``--set key=value`` options.

    Raises:
        UserError: One has no equals sign.

    Example:
        >>> overrides(["lr=0.1", "batch_size=64"])
        {'lr': '0.1', 'batch_size': '64'}
    """
    found = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set was given {pair!r}: write it as key=value, for example --set lr=0.1.")
        found[key.strip()] = text.strip()
    return found


def recipes(names: Iterable[str]) -> list[Recipe]:
    """Return the recipes of these names, each once; ``all`` stands for every one of them.

    Raises:
        UserError: A name is unknown; the message has the nearest ones.
    """
    from apo_experiments.recipes import RECIPES

    found: dict[str, Recipe] = {}
    for name in names:
        if name == "all":
            found |= RECIPES
        elif name in RECIPES:
            found[name] = RECIPES[name]
        else:
            raise UserError(
                f"There is no recipe {name!r}{nearest(name, RECIPES)} (`apo list` shows all {len(RECIPES)} of them)."
            )
    return list(found.values())


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question for the name that was meant, or nothing if none is near.

    Example:
        >>> nearest("rosenbrok", ["rosenbrock", "mnist-mlp"])
        '; did you mean rosenbrock?'
    """
    # Underscores for hyphens and capitals are the commonest slips, and no slips at all.
    matches = difflib.get_close_matches(name.lower().replace("_", "-"), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
