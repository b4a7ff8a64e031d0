"""``apo publish``: from finished runs to compact records, and from those to the page of results."""

from __future__ import annotations

import argparse
from pathlib import Path

from apo_experiments import no_tuning, records
from apo_experiments.commands import options
from apo_experiments.commands.tables import show
from apo_experiments.errors import UserError
from apo_experiments.progress import counted
from apo_experiments.publication import compact
from apo_experiments.publication.page import publish_page
from apo_experiments.recipes import FAMILIES


def execute(arguments: argparse.Namespace) -> int:
    """Publish.

    Returns:
        0.

    Raises:
        UserError: There is no page here and no folder was named, so that this is probably not a clone.
    """
    root, page = options.runs_folder(arguments), arguments.docs / "results.md"
    if arguments.to is None and not page.exists():
        raise UserError(f"There is no {page} here: run it in a clone of the project, or name folders (--to, --docs).")
    to = arguments.to or Path("results")
    found, published = records.find(root, scale=arguments.scale), False
    for recipe in options.recipes(arguments.recipes or ["all"]):
        if arguments.scale not in recipe.scales:
            continue
        epochs = recipe.scales[arguments.scale].epochs
        own = [record for record in found if record.config.recipe == recipe.name and record.finished]
        if recipe.name in FAMILIES["no-tuning"]:  # one file for all runs of a task, and a page of its own
            for path in no_tuning.archive(own, to):
                published = True
                show(f"{recipe.name}: {counted(len(own), 'run')}, in {path}")
            continue
        results = compact.finals([record for record in own if arguments.all or record.config.epochs == epochs])
        known = sum(compact.existing(record.config, to) is not None for record in results)
        for record in results:
            compact.write(record, to)
        logged = compact.log_tuning(recipe, arguments.scale, own, to)
        if results or logged:
            published = True
            kept = f" ({known} there already, kept)" if known else ""
            show(f"{recipe.name}: {counted(len(results), 'run')}{kept}" + (f", and {logged}" if logged else ""))
    if not published:
        length = "" if arguments.all else " and full length (--all takes any length)"
        show(f"There is nothing new to publish: {root} has no finished runs of scale {arguments.scale}{length}.")
    if not page.exists():
        written = f"only {to} was written" if published else "no page was written"
        show(f"There is no {page}, so {written}: --docs names the folder of a page to bring up to date.")
        return 0
    written = publish_page(to, arguments.docs)
    if (arguments.docs / "no-tuning.md").exists():
        written += no_tuning.publish(to, arguments.docs)
    for path in written:
        show(str(path))
    return 0
