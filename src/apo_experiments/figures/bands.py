"""Curves of several seeds as one line with a band."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from apo_experiments.records import Record, grouped


def draw_band(
    axes: Axes,
    records: Sequence[Record],
    column: str,
    style: dict[str, Any],
    label: str | None = None,
    x: str = "epoch",
) -> list[float]:
    """Draw the mean over seeds as a line and their range from least to greatest as a band.

    Args:
        axes: Where.
        records: The seeds of one entry.
        column: The column of the rows.
        style: How the line looks.
        label: Its name in the legend.
        x: The column of the horizontal axis.

    Returns:
        All values, for the choice of the axis; empty if there is nothing to draw.
    """
    rows = [row for record in records for row in record.rows if isinstance(row.get(column), (int, float))]
    points = grouped([row for row in rows if math.isfinite(row[column])], lambda row: row.get(x, row.get("step", 0)))
    curve = sorted((place, [row[column] for row in seeds]) for place, seeds in points.items())
    if not curve:
        return []
    positions = [position for position, _ in curve]
    marker = "o" if len(curve) == 1 else None  # a line of one point is invisible
    axes.plot(positions, [sum(v) / len(v) for _, v in curve], label=label, marker=marker, **style)
    if any(len(values) > 1 for _, values in curve):
        low, high = [min(v) for _, v in curve], [max(v) for _, v in curve]
        axes.fill_between(positions, low, high, color=style["color"], alpha=0.18, linewidth=0)
    return [figure for _, values in curve for figure in values]
