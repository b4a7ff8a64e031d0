"""``apo plot``: draw the figures of recipes that have been run."""

from __future__ import annotations

import argparse

from apo_experiments import figures
from apo_experiments.commands import options
from apo_experiments.commands.tables import show
from apo_experiments.errors import UserError
from apo_experiments.records import find
from apo_experiments.tuning import current


def execute(arguments: argparse.Namespace) -> int:
    """Draw and save the figures, and print the names of the files."""
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
