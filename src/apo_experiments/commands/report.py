"""``apo report``: one page with everything that has been run."""

from __future__ import annotations

import argparse

from apo_experiments.commands import options
from apo_experiments.commands.tables import show
from apo_experiments.progress import counted
from apo_experiments.report import write


def execute(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    options.writable("--out", arguments.out)
    root = options.runs_folder(arguments)
    options.say(f"Reading the records in {root} and drawing their figures ...")
    count = write(arguments.out, root, arguments.scale)
    show(f"{arguments.out}: {counted(count, 'recipe')} with results. Open it in a browser; it needs no network.")
    return 0
