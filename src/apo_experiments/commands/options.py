"""What the options of a command mean, and suggestions for mistyped names."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from apo_experiments import renamed
from apo_experiments.errors import UserError
from apo_experiments.files import write_atomically
from apo_experiments.recipe import Recipe
from apo_experiments.recipes import FAMILIES, RECIPES


def say(sentence: str) -> None:
    """Print something for the user, beside the results; a closed output does not stop the command."""
    with suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)


def runs_folder(arguments: argparse.Namespace) -> Path:
    """Return the folder of all runs: ``--runs``, else ``$APO_RUNS``, else ``./runs``."""
    return (arguments.runs or Path(os.environ.get("APO_RUNS") or "runs")).expanduser()


def device(choice: str) -> str:
    """Return the device that ``--device`` means on this machine."""
    return choice if choice != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


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
    """Check what can be checked before hours of work, and read ``--set`` and ``--grid``, in words of today.

    Returns:
        When ``--time-limit`` is reached, as a value of ``time.time()``.
    """
    deadline = None if arguments.time_limit is None else time.time() + arguments.time_limit
    writable("--json", arguments.json)
    settings = _pairs(arguments.set, "--set", "--set lr=0.1")
    axes = _pairs(getattr(arguments, "grid", None), "--grid", "--grid lr=0.1,0.03")
    arguments.set, arguments.grid, sentences = renamed.in_words_of_today(settings, axes)
    for sentence in sentences:
        say(f"apo: {sentence}")
    return deadline


def write_json(arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the values of a table to the file that ``--json`` names."""
    if arguments.json:
        write_atomically(arguments.json, (json.dumps(rows, indent=1, default=str) + "\n").encode(), "--json")


def overrides(arguments: argparse.Namespace) -> dict[str, str]:
    """Return what ``--set`` and ``--epochs`` change."""
    return arguments.set if arguments.epochs is None else {**arguments.set, "epochs": str(arguments.epochs)}


def grid(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return the values of each key in ``--grid``."""
    found = {key: text.split(",") for key, text in arguments.grid.items()}
    for key, values in found.items():
        if not all(value.strip() for value in values):
            raise UserError(
                f"--grid was given no value, or an empty one, for {key!r}: write for example --grid lr=0.1,0.03."
            )
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
    found: dict[str, Recipe] = {}
    for name in names:
        if name == "all":
            found |= RECIPES
        elif name in RECIPES:
            found[name] = RECIPES[name]
        elif name in FAMILIES:
            found |= {member: RECIPES[member] for member in FAMILIES[name]}
        else:
            # Underscores for hyphens and capitals are the most common mistakes, so they always match.
            near = difflib.get_close_matches(name.lower().replace("_", "-"), RECIPES, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UserError(f"There is no recipe {name!r}{hint} (`apo list` shows all {len(RECIPES)} of them).")
    return list(found.values())
