"""``apo data``: list, fetch and verify data sets."""

from __future__ import annotations

import argparse

from apo_experiments.commands.tables import show, text_table
from apo_experiments.data.fetch import fetch, verify
from apo_experiments.data.locate import directory, state
from apo_experiments.data.registry import DATASETS, dataset
from apo_experiments.errors import UserError


def execute(arguments: argparse.Namespace) -> int:
    """Run the action.

    Returns:
        0, or 1 if ``verify`` finds a data set that is damaged.
    """
    names = list(DATASETS) if arguments.names == ["all"] else [dataset(name).name for name in arguments.names]
    root = directory(arguments.data_dir)
    if arguments.action == "list":
        chosen = [DATASETS[name] for name in names or DATASETS]
        rows = [[entry.name, state(entry.name, root, thorough=True), entry.title, entry.licence] for entry in chosen]
        print(text_table(["name", "state", "what it is", "licence"], rows))
        print(f"\nThe folder is {root}; choose another with --data-dir or APO_DATA.")
        if any(row[1] == "damaged" for row in rows):
            print("`apo data verify` says what is wrong with damaged files, `apo data fetch NAME` replaces them.")
        return 0
    if arguments.action == "fetch":
        if not names:
            raise UserError("`apo data fetch` needs the names of data sets, or all: `apo data list` shows them.")
        for name in names:
            fetch(name, root, report=show)
        return 0
    # Without names, a data set that is not present is no error.
    chosen = names or [name for name, entry in DATASETS.items() if any((root / f.path).exists() for f in entry.files)]
    if not chosen:
        print(f"There are no data sets in {root}.")
    damaged = False
    for name in chosen:
        problems = verify(name, root)
        damaged = damaged or bool(problems)
        show(f"{name}: {'; '.join(problems) if problems else 'sound'}")
    return int(damaged)
