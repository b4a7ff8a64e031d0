"""``apo plot``: draw the figures of recipes that have been run."""

from __future__ import annotations

import argparse
from pathlib import Path

from apo_experiments.commands import options
from apo_experiments.commands.tables import show
from apo_experiments.errors import UserError

_EXAMPLES = """\
  apo plot                               all recipes that have records, png and pdf
  apo plot rosenbrock --out figures      one of them
  apo plot mnist-mlp --scale cpu --figure bars"""


def add_to(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = options.add_command(subparsers, "plot", "draw figures from the records of runs", _EXAMPLES, execute)
    parser.add_argument("recipes", metavar="RECIPE", nargs="*", default=["all"], help="names from `apo list`")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("figures"), help="(default: figures)")
    parser.add_argument("--scale", choices=options.SCALES, help="(default: all that have records)")
    parser.add_argument("--figure", metavar="NAME", help="a figure other than the recipe's own")
    options.add_runs_option(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Draw and save the figures, and print the names of the files."""
    from apo_experiments import figures
    from apo_experiments.records import find
    from apo_experiments.results import current

    root = options.runs_folder(arguments)
    recipes = options.recipes(arguments.recipes)
    records = find(root, scale=arguments.scale)
    drawn = False
    for recipe in recipes:
        for scale in recipe.scales:
            chosen = [record for record in current(recipe, scale, records) if record.rows]
            if chosen:
                figure, drawn = figures.draw(recipe, chosen, arguments.figure), True
                for path in figures.save(figure, arguments.out, f"{recipe.name}-{scale}"):
                    show(str(path))
    if not drawn:
        names = "" if arguments.recipes == ["all"] else f" of {', '.join(arguments.recipes)}"
        if {record.config.recipe for record in records} & {recipe.name for recipe in recipes}:
            raise UserError(f"The runs{names} in {root} have no curve: they diverged or stopped in the first epoch.")
        raise UserError(f"There are no records{names} in {root}: run `apo run {recipes[0].name}` first.")
    return 0
