"""The final metric of each method next to the paper's.

Points rather than bars from zero: bars hide the difference between 94 and 95 per cent.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from apo_experiments.figures.curves import axis_name
from apo_experiments.figures.style import COLOURS, line_styles
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record
from apo_experiments.results import summarise


def bars(records: Sequence[Record], recipe: Recipe) -> Figure:
    """Draw one row for each method: seeds as dots, their mean as a bar across, the paper's figure as a diamond."""
    results = [result for result in summarise(recipe, records) if result.values or result.diverged]
    styles = line_styles(recipe)
    figure = Figure(figsize=(6.4, 0.34 * len(results) + 1.1), layout="constrained")
    axes = figure.subplots()
    shown = [result.mean for result in results if result.mean is not None] + [r.paper for r in results if r.paper]
    for position, result in enumerate(results):
        colour = styles[result.label]["color"]
        if result.mean is not None:
            axes.plot([min(result.values), max(result.values)], [position] * 2, color=colour, linewidth=1.5)
            axes.plot(result.values, [position] * len(result.values), "o", color=colour, markersize=4, alpha=0.6)
            axes.plot(result.mean, position, "|", color=colour, markersize=14, markeredgewidth=3)
        else:
            axes.annotate(
                "diverged", (0.01, position), xycoords=("axes fraction", "data"), va="center", color="0.4", size="small"
            )
        if result.paper is not None:
            axes.plot(result.paper, position, "D", markersize=6, markerfacecolor="none", markeredgecolor=COLOURS[-1])
    axes.set_yticks(range(len(results)), [result.label for result in results])
    axes.set_ylim(max(len(results), 1) - 0.5, -0.5)
    if shown and min(shown) > 0 and max(shown) / min(shown) > 20:
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8))
    paper = "; diamonds: the paper" if any(result.paper is not None for result in results) else ""
    axes.set_xlabel(f"{axis_name(recipe.metric)} ({recipe.better}{paper})")
    return figure
