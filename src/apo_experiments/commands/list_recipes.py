"""``apo list``: the recipes."""

from __future__ import annotations

import argparse
from pathlib import Path

from apo_experiments.commands import options
from apo_experiments.commands.tables import text_table
from apo_experiments.data.locate import state
from apo_experiments.methods import METHODS
from apo_experiments.progress import counted
from apo_experiments.recipe import NOT_IN_PAPER, SCALES, Recipe
from apo_experiments.recipes import plan
from apo_experiments.results import MARK, differences_of_scale, own_method


def execute(arguments: argparse.Namespace) -> int:
    """Print the table, or the details of the recipes that were named."""
    if arguments.recipes:
        chosen = options.recipes(arguments.recipes)
        print("\n\n".join(_details(recipe, arguments.data_dir) for recipe in chosen))
        return 0
    rows = [
        [
            *(recipe.name, recipe.paper),
            *(_time(recipe.scales[name].minutes) if name in recipe.scales else "-" for name in SCALES),
            *(_data(recipe, arguments.data_dir), recipe.title),
        ]
        for recipe in options.recipes(["all"])
    ]
    header = ["recipe", "paper", *SCALES, "data", "what it shows"]
    print(text_table(header, rows, right=[2, 3, 4]))
    print("\nTimes are for all methods and seeds: smoke and cpu on two cores, paper on one GPU.")
    print("The data are needed at the scales cpu and paper; `apo data fetch NAME` gets what is missing.")
    return 0


def _time(minutes: float) -> str:
    """Write a rough time.

    Example:
        >>> _time(0.05), _time(2), _time(90), _time(24000)
        ('3 s', '2 min', '1.5 h', '400 h')
    """
    if minutes < 1:
        return f"{max(round(minutes * 60), 1)} s"
    if minutes < 90:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.2g} h" if minutes < 600 else f"{minutes / 60:.0f} h"


def _data(recipe: Recipe, data_dir: Path | None) -> str:
    return ", ".join(f"{name} ({state(name, data_dir)})" for name in recipe.data) or "none needed"


def _details(recipe: Recipe, data_dir: Path | None) -> str:
    lines = [f"{recipe.name}: {recipe.title}", f"  paper   {recipe.paper}", f"  data    {_data(recipe, data_dir)}"]
    lines.append(f"  metric  {recipe.metric} ({recipe.better})")
    for name, scale in recipe.scales.items():
        size = f"{counted(scale.epochs, 'epoch')}, {counted(scale.seeds, 'seed')}"
        lines.append(f"  {name:<7} {size}, {_time(scale.minutes)}")
        if text := differences_of_scale(recipe, name):
            lines.append(f"          not the paper's setting: {text}")
    if recipe.notes:
        lines.append(f"  claim   {recipe.notes}")
    lines.append("  methods (--method):")
    planned = {run.label: run for run in plan(recipe, list(recipe.scales)[-1], seeds=1)}
    ours = {label for label, run in planned.items() if recipe.paper != NOT_IN_PAPER and own_method(run)}
    for entry in recipe.entries:
        mark = f" {MARK}" if entry.label in ours else ""
        pairs = " ".join(f"{key}={setting}" for key, setting in {**entry.hyper, **entry.options}.items())
        lines.append(f"    {entry.label}{mark}: {entry.method}  {pairs}".rstrip())
        if entry.grid:
            lines.append("      grid: " + ", ".join(f"{key} in {list(points)}" for key, points in entry.grid.items()))
    if ours:
        lines.append(f"    {MARK} not the paper's method: this library's settings")
    keys = {key for entry in recipe.entries if entry.method in METHODS for key in METHODS[entry.method].defaults}
    task, methods = (", ".join(sorted(names)) or "nothing" for names in (recipe.defaults, keys))
    lines.append(f"  --set takes epochs; of the task {task}; of the methods {methods}")
    return "\n".join(lines)
