"""``apo data``: list, fetch and verify data sets."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from apo_experiments.commands import options
from apo_experiments.commands.tables import show, text_table

__all__ = ["add_to", "execute"]

_EXAMPLES = """\
  apo data list                     all data sets, and which are present
  apo data fetch mnist protein      download from the official addresses
  apo data verify                   compare all present files with their checksums"""


def add_to(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = options.add_command(subparsers, "data", "list, fetch and verify data sets", _EXAMPLES)
    parser.add_argument("action", choices=("list", "fetch", "verify"), help="what to do")
    parser.add_argument("names", metavar="NAME", nargs="*", help="data sets, or all (verify: all that are present)")
    parser.add_argument(
        "--data-dir", metavar="DIR", type=Path, help="their folder (default: $APO_DATA, else ~/.cache/apo-data)"
    )
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Run the action.

    Returns:
        0, or 1 if a data set is damaged.
    """
    actions: dict[str, Callable[[list[str], Path | None], int]] = {"list": _list, "fetch": _fetch, "verify": _verify}
    return actions[arguments.action](_names(arguments.names), arguments.data_dir)


def _names(names: list[str]) -> list[str]:
    from apo_experiments.data.registry import DATASETS, dataset

    return list(DATASETS) if names == ["all"] else [dataset(name).name for name in names]


def _list(names: list[str], data_dir: Path | None) -> int:
    from apo_experiments.data.locate import directory, is_present
    from apo_experiments.data.registry import DATASETS

    rows = [
        [name, "here" if is_present(name, data_dir) else "missing", DATASETS[name].title, DATASETS[name].licence]
        for name in names or DATASETS
    ]
    print(text_table(["name", "state", "what it is", "licence"], rows))
    print(f"\nThe folder is {directory(data_dir)}; choose another with --data-dir or APO_DATA.")
    return 0


def _fetch(names: list[str], data_dir: Path | None) -> int:
    from apo_experiments.data.fetch import fetch
    from apo_experiments.errors import UserError

    if not names:
        raise UserError("`apo data fetch` needs the names of data sets, or all: `apo data list` shows them.")
    for name in names:
        fetch(name, data_dir, report=show)
    return 0


def _verify(names: list[str], data_dir: Path | None) -> int:
    from apo_experiments.data.fetch import verify
    from apo_experiments.data.locate import directory
    from apo_experiments.data.registry import DATASETS

    root = directory(data_dir)
    # Without names, a data set that is not present is no error.
    chosen = names or [name for name, entry in DATASETS.items() if any((root / f.path).exists() for f in entry.files)]
    if not chosen:
        print(f"There are no data sets in {root}.")
    damaged = False
    for name in chosen:
        problems = verify(name, data_dir)
        damaged = damaged or bool(problems)
        show(f"{name}: {'; '.join(problems) if problems else 'sound'}")
    return int(damaged)
