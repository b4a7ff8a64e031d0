"""The Rosenbrock function: loss and rate over steps, and the way down the valley."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apo_experiments.figures.curves import draw_panel
from apo_experiments.figures.style import grid, legend_below, line_styles
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record, by_label


def rosenbrock(records: Sequence[Record], recipe: Recipe) -> Figure:
    """Draw the loss, the rate and, where the rows have ``x`` and ``y``, the paths on the function's contours."""
    paths = {label: _path(seeds[0]) for label, seeds in by_label(records).items()}
    has_paths = any(map(len, paths.values()))
    figure, ((*panels,),) = grid(1, 3 if has_paths else 2)
    loss = recipe.metric if any(recipe.metric in row for record in records for row in record.rows) else "train_loss"
    draw_panel(panels[0], records, recipe, loss, x="step")
    panels[0].set_yscale("log")
    panels[0].set_ylabel("f(x, y)")
    draw_panel(panels[1], records, recipe, "rate", x="step")
    if has_paths:
        _draw_paths(panels[2], paths, recipe)
    legend_below(figure, panels[0])
    return figure


def _path(record: Record) -> numpy.ndarray:
    """Return the points that a run went through, ``[points, 2]``; no row holds the one that it started from."""
    points = [(row["x"], row["y"]) for row in record.rows if row.get("x") is not None and row.get("y") is not None]
    start = [tuple(record.config.options["start"])] if points and "start" in record.config.options else []
    return numpy.array([*start, *points], dtype=float).reshape(-1, 2)


def _draw_paths(axes: Axes, paths: dict[str, numpy.ndarray], recipe: Recipe) -> None:
    # A run that leaves the valley must not shrink the valley to a dot.
    near = numpy.clip(numpy.concatenate([*paths.values(), [[1.0, 1.0], [1.0, -1.5]]]), -3, 3)
    (left, bottom), (right, top) = near.min(0) - 0.3, near.max(0) + 0.3
    x, y = numpy.meshgrid(numpy.linspace(left, right, 200), numpy.linspace(bottom, top, 200))
    f = (1 - x) ** 2 + 100 * (y - x**2) ** 2
    axes.contour(x, y, numpy.log10(f + 1e-6), levels=10, colors="0.75", linewidths=0.7)
    for label, style in line_styles(recipe, list(paths)).items():
        axes.plot(paths[label][:, 0], paths[label][:, 1], **style)
    axes.plot(1, 1, "*", color="black", markersize=9)
    axes.annotate("minimum", (1, 1), xytext=(4, 4), textcoords="offset points", size="small")
    axes.set(xlabel="x", ylabel="y", xlim=(left, right), ylim=(bottom, top))
    axes.grid(visible=False)
