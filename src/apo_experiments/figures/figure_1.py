"""Figure 1: exact proximal updates of a fitted curve towards one new example.

Rows of the records, one for each point of the grid: ``x``, ``old`` (the prediction before the update) and one column
for each update whose name begins with ``new``, from the largest weight of the proximal terms to the smallest. Where
known, ``example_x`` and ``example_y`` in any row or in the final metrics are the new example, and ``data_x`` and
``data_y`` the fitted data. A run with several updates gets axes of its own; runs with one update each share axes by
which of ``fsd_weight`` and ``wsd_weight`` they use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apo_experiments.figures.style import grid
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record

__all__ = ["figure_1"]

#: The name of a curve and its points.
_Curve = tuple[str, list[float], list[float]]


def figure_1(records: Sequence[Record], recipe: Recipe) -> Figure:
    """Draw the curve before and after each update, large weights red, small ones blue."""
    first = {record.config.label: record for record in reversed(records)}  # one seed tells it all
    ordered = [first[entry.label] for entry in recipe.entries if entry.label in first]
    panels: dict[str, list[Record]] = {}
    for record in ordered:
        panels.setdefault(_panel(record), []).append(record)
    figure, (row,) = grid(1, len(panels))
    for axes, (title, members) in zip(row, panels.items(), strict=True):
        _draw(axes, members)
        axes.set_title(title)
    row[0].set_ylabel("prediction")
    return figure


def _panel(record: Record) -> str:
    if len(_updates(record)) > 1:
        return record.config.label
    used = [name for name, key in (("FSD", "fsd_weight"), ("WSD", "wsd_weight")) if record.config.hyper.get(key)]
    return " + ".join(used) or record.config.label


def _updates(record: Record) -> list[str]:
    return [name for name in dict.fromkeys(key for row in record.rows for key in row) if name.startswith("new")]


def _draw(axes: Axes, members: Sequence[Record]) -> None:
    curves: list[_Curve] = []
    for record in members:
        updates = _updates(record)
        names = updates if len(updates) > 1 else [record.config.label]
        curves += [
            (name.removeprefix("new").strip(" _"), *_points(record, "x", key))
            for name, key in zip(names, updates, strict=True)
        ]
    shades = matplotlib.colormaps["coolwarm_r"]
    for position, (name, x, y) in enumerate(curves):
        colour: Any = shades(position / max(len(curves) - 1, 1))
        axes.plot(x, y, color=colour, linewidth=1.6, label=name)
    axes.plot(*_points(members[0], "x", "old"), color="black", linewidth=1.6, linestyle="--", label="before")
    axes.plot(*_points(members[0], "data_x", "data_y"), ".", color="0.5", markersize=4)
    example = _example(members[0])
    if example:
        axes.plot(*example, "*", color="black", markersize=11, label="new example")
    axes.set_xlabel("input")
    axes.legend(fontsize="x-small", loc="best")


def _points(record: Record, x: str, y: str) -> tuple[list[float], list[float]]:
    rows = [row for row in record.rows if row.get(x) is not None and row.get(y) is not None]
    return [row[x] for row in rows], [row[y] for row in rows]


def _example(record: Record) -> tuple[float, float] | None:
    places = [*record.rows, (record.summary or {}).get("metrics", {})]
    found = [(place["example_x"], place["example_y"]) for place in places if place.get("example_x") is not None]
    return found[0] if found else None
