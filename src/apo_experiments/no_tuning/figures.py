"""The figures of the benchmark: regrets of all methods, and the learned rates beside the tuned ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from matplotlib.figure import Figure

from apo_experiments.figures.curves import draw_band
from apo_experiments.figures.style import COLOURS, applied, grid, legend_below
from apo_experiments.no_tuning.scores import NEAR, Runs, Table, standings
from apo_experiments.recipe import Recipe
from apo_experiments.recipes.no_tuning import FAMILY

#: The lines of a panel of rates: a learned rate, and the tuned cosine of the same optimizer.
_PAIRS = {"SGDm": ("SGDm-APO", "SGDm tuned"), "AdamW": ("AdamW-APO", "AdamW tuned")}
_COLUMNS = 4


def regrets(table: Table) -> Figure:
    """Draw one row for each method, the best mean rank on top: a dot for each task, a bar at the mean."""
    order = standings(table).dropna(subset="rank")[::-1]
    with applied():
        figure, axes = grid(1, 1, width=8, height=0.3 * len(order) + 0.8)
        axis = axes[0][0]
        for place, (method, mean) in enumerate(order["regret"].items()):
            colour = COLOURS[0 if "APO" in str(method) else 1]
            found = table.loc[table["method"] == method, "regret"]
            axis.plot(found, [place] * len(found), "o", color=colour, alpha=0.55, markersize=5, linestyle="none")
            axis.plot([mean], [place], "|", color=colour, markersize=16, markeredgewidth=2.5)
        axis.axvspan(-1e3, NEAR, color=COLOURS[2], alpha=0.12, linewidth=0)
        axis.set_xscale("symlog", linthresh=1)
        axis.set_xlim(min(-1.0, 1.5 * table["regret"].min()), 130)
        axis.set_yticks(range(len(order)), list(order.index))
        axis.set_xlabel("regret in per cent of what the tuned rate learned (shaded: within 1%, or above it)")
    return figure


def rates(runs: Mapping[str, tuple[Recipe, Runs]], table: Table) -> Figure:
    """Draw the rate over the epochs, one panel for each task."""
    with applied():
        tasks = list(table.groupby("task", sort=False))
        figure, axes = grid(math.ceil(len(tasks) / _COLUMNS), min(_COLUMNS, len(tasks)), width=2.7, height=2.0)
        panels = [panel for row in axes for panel in row]
        for panel, (name, own) in zip(panels, tasks, strict=False):
            entries = dict(zip(own["method"], own["entry"], strict=True))
            for colour, pair in zip(COLOURS, _PAIRS.values(), strict=False):
                for method, line in zip(pair, ("-", "--"), strict=True):
                    if method in entries:
                        style = {"color": colour, "linestyle": line, "linewidth": 1.6}
                        # A cosine ends at zero, which a logarithmic axis cannot show.
                        shown = [
                            replace(one, rows=[row for row in one.rows if row["rate"] > 0])
                            for one in runs[str(name)][1][entries[method]]
                        ]
                        draw_band(panel, shown, "rate", style, method)
            panel.set_yscale("log")
            panel.set_title(str(name).removeprefix(f"{FAMILY}-"), fontsize="small")
        for panel in panels[len(tasks) :]:
            panel.set_visible(False)
        legend_below(figure, panels[0])
    return figure
