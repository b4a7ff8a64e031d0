"""``apo publish``: from finished runs to compact records, and from those to the page of results."""

from __future__ import annotations

import argparse
from pathlib import Path

from apo_experiments.commands import options
from apo_experiments.commands.tables import show

__all__ = ["add_to", "execute"]

_EXAMPLES = """\
  apo publish                                    all finished runs of the scale paper, at full length
  apo publish cifar10-lenet --runs elsewhere
  apo publish rosenbrock --scale cpu --all       runs of any length
Records go to results/, tables and figures to docs/. Existing records are kept; publishing twice changes nothing."""


def add_to(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = options.add_command(
        subparsers, "publish", "copy finished runs into results and bring docs up to date", _EXAMPLES
    )
    parser.add_argument("recipes", metavar="RECIPE", nargs="*", help="names from `apo list` (default: all)")
    parser.add_argument("--scale", choices=("cpu", "paper"), default="paper", help="(default: paper)")
    parser.add_argument("--all", action="store_true", help="runs of any length")
    parser.add_argument("--to", metavar="DIR", type=Path, default=Path("results"), help="(default: results)")
    parser.add_argument(
        "--docs", metavar="DIR", type=Path, default=Path("docs"), help="with results.md (default: docs)"
    )
    options.add_runs_option(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Publish.

    Returns:
        0.
    """
    from apo_experiments import publication, records
    from apo_experiments.progress import counted
    from apo_experiments.publication.tuning_log import finals
    from apo_experiments.recipes import FAMILIES

    root = options.runs_folder(arguments)
    found, published = records.find(root, scale=arguments.scale), False
    for recipe in options.recipes(arguments.recipes or ["all"]):
        if arguments.scale not in recipe.scales:
            continue
        epochs = recipe.scales[arguments.scale].epochs
        own = [record for record in found if record.config.recipe == recipe.name and record.finished]
        if recipe.name in FAMILIES["no-tuning"]:  # one file for all runs of a task, and a page of its own
            from apo_experiments.no_tuning import archive

            for path in archive(own, arguments.to):
                published = True
                show(f"{recipe.name}: {counted(len(own), 'run')}, in {path}")
            continue
        results = finals([record for record in own if arguments.all or record.config.epochs == epochs])
        for record in results:
            publication.write(record, arguments.to)
        logged = publication.log_tuning(recipe, arguments.scale, own, arguments.to)
        if results or logged:
            published = True
            show(f"{recipe.name}: {counted(len(results), 'run')}" + (f", and {logged}" if logged else ""))
    if not published:
        length = "" if arguments.all else " and full length (--all takes any length)"
        show(f"There is nothing new to publish: {root} has no finished runs of scale {arguments.scale}{length}.")
    if (arguments.docs / "results.md").exists():
        for path in publication.publish_page(arguments.to, arguments.docs):
            show(str(path))
    if (arguments.docs / "no-tuning.md").exists():
        from apo_experiments import no_tuning

        for path in no_tuning.publish(arguments.to, arguments.docs):
            show(str(path))
    return 0
