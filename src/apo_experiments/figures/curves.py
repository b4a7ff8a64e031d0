"""Training loss, metric and learning rate over epochs: the figure of most recipes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from apo_experiments.figures.style import grid, legend_below, line_styles, scale_axis
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record, by_label, grouped

#: With more entries than this on one axis, each base optimizer gets its own row.
_MOST_LINES = 7


def curves(records: Sequence[Record], recipe: Recipe) -> Figure:
    """Draw loss, metric and rate, seeds as bands."""
    present = by_label(records)
    groups = [list(present)]
    if len(present) > _MOST_LINES:
        methods = {entry.label: entry.method.removesuffix("-apo") for entry in recipe.entries if entry.label in present}
        by_base = grouped(methods, methods.__getitem__)
        groups = list(by_base.values()) if max(map(len, by_base.values())) > 1 else groups
    known = {column for record in records for row in record.rows for column in row if row[column] is not None}
    columns = [column for column in dict.fromkeys(["train_loss", recipe.metric, "rate"]) if column in known]
    figure, axes = grid(len(groups), max(len(columns), 1))
    for row, labels in zip(axes, groups, strict=True):
        chosen = [record for record in records if record.config.label in labels]
        for panel, column in zip(row, columns, strict=False):
            draw_panel(panel, chosen, recipe, column)
        if len(groups) > 1:
            row[0].legend(loc="best", fontsize="small")
    if len(groups) == 1:
        legend_below(figure, axes[0][0])
    return figure


def draw_panel(
    axes: Axes,
    records: Sequence[Record],
    recipe: Recipe,
    column: str,
    x: str = "epoch",
    styles: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Draw one column of the rows for all entries.

    Args:
        axes: Where.
        records: The runs.
        recipe: Their recipe.
        column: For example ``"train_loss"``.
        x: The column of the horizontal axis.
        styles: How the line of each entry looks, in the order of drawing; as in other figures by default.
    """
    groups = by_label(records)
    if styles is None:
        usual = line_styles(recipe, list(groups))
        styles = {label: usual[label] for label in groups}
    values: list[float] = []
    first: list[float] = []
    for label, style in styles.items():
        drawn = draw_band(axes, groups[label], column, style, label, x)
        values += drawn
        first += drawn[:1]
    scale_axis(axes, values, ratio=3.0 if column == "rate" else 20.0)
    if column == "train_loss" and values and max(values) > 3 * max(first):
        # A run that diverges would squeeze all others to the bottom.
        axes.set_ylim(top=3 * max(first))
    axes.set(xlabel=x, ylabel=rate_name(records) if column == "rate" else axis_name(column))
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10]))  # no half epochs


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


def rate_name(records: Sequence[Record]) -> str:
    """Return the name of the column ``rate``, which for a preconditioner is the mean of its P times its scale."""
    learned = any("apo/P/mean" in row for record in records for row in record.rows)
    return "learning rate or mean of P" if learned else axis_name("rate")


def axis_name(column: str) -> str:
    """Return the name of a column for readers.

    Example:
        >>> axis_name("test_accuracy"), axis_name("train_loss"), axis_name("rate")
        ('test accuracy', 'training loss', 'learning rate')
    """
    return {"train_loss": "training loss", "rate": "learning rate"}.get(column, column.replace("_", " "))
