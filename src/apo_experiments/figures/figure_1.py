"""Figure 1: exact proximal updates of a fitted curve towards one new example.

Each run is one update. Its rows are points of the curve, ``x``, ``old`` and ``new`` (predictions before and after),
or of the data, ``data_x`` and ``data_y``; its metrics ``example_x`` and ``example_y`` are the new example. Updates
share axes by which of the proximal terms (``fsd_weight``, ``wsd_weight``) they use.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from apo_experiments.figures.style import COLOURS, grid
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record, grouped

_TERMS = {"fsd_weight": "FSD", "wsd_weight": "WSD"}


def figure_1(records: Sequence[Record], recipe: Recipe) -> Figure:
    """Draw the curve before and after each update: strong proximal terms red, weak ones blue, as in the paper."""
    first = {record.config.label: record for record in reversed(records)}  # one seed is enough
    panels = grouped([first[entry.label] for entry in recipe.entries if entry.label in first], _terms)
    figure, (row,) = grid(1, len(panels))
    for axes, (title, members) in zip(row, panels.items(), strict=True):
        members.sort(key=lambda record: sum(record.config.hyper.get(key) or 0.0 for key in _TERMS), reverse=True)
        _draw(axes, members)
        axes.set_title(title)
    row[0].set_ylabel("prediction")
    return figure


def _terms(record: Record) -> str:
    return " + ".join(name for key, name in _TERMS.items() if record.config.hyper.get(key)) or "no proximal term"


def _draw(axes: Axes, members: Sequence[Record]) -> None:
    shades = LinearSegmentedColormap.from_list("strength", [COLOURS[0], COLOURS[3], COLOURS[1]])
    axes.plot(*_points(members[0], "data_x", "data_y"), ".", color="0.6", markersize=4)
    axes.plot(*_points(members[0], "x", "old"), color="black", linewidth=1.4, linestyle="--", label="before")
    for position, record in enumerate(members):
        colour = shades(position / max(len(members) - 1, 1))
        axes.plot(*_points(record, "x", "new"), color=colour, linewidth=1.6, label=record.config.label)
    metrics = members[0].metrics
    if metrics.get("example_x") is not None:
        axes.plot(metrics["example_x"], metrics["example_y"], "*", color="black", markersize=10, label="new example")
    axes.set_xlabel("input")
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)


def _points(record: Record, x: str, y: str) -> tuple[list[float], list[float]]:
    rows = [row for row in record.rows if row.get(x) is not None and row.get(y) is not None]
    return [row[x] for row in rows], [row[y] for row in rows]
