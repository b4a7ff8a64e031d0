"""``apo report``: one page with everything that has been run."""

from __future__ import annotations

import argparse
from pathlib import Path

from apo_experiments.commands import options
from apo_experiments.commands.tables import show

_EXAMPLES = """\
  apo report                                      apo-report.html from ./runs
  apo report --out page.html --runs elsewhere
  apo report --scale paper                        leave out the smaller scales"""


def add_to(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = options.add_command(subparsers, "report", "write one page with all figures and tables", _EXAMPLES, execute)
    parser.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("apo-report.html"), help="(default: apo-report.html)"
    )
    parser.add_argument("--scale", choices=options.SCALES, help="(default: all; smoke only if there is no other)")
    options.add_runs_option(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    # What the page needs: if it is missing, that is said before anything is begun.
    import jinja2  # noqa: F401
    import numpy  # noqa: F401

    from apo_experiments.progress import counted
    from apo_experiments.report import write

    options.writable("--out", arguments.out)
    root = options.runs_folder(arguments)
    options.say(f"Reading the records in {root} and drawing their figures ...")
    count = write(arguments.out, root, arguments.scale)
    show(f"{arguments.out}: {counted(count, 'recipe')} with results. Open it in a browser; it needs no network.")
    return 0
