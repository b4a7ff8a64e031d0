"""The style of all figures: colours for every kind of colour vision, line styles that work in black and white."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apo_experiments.recipe import Recipe

#: Okabe and Ito's palette without its yellow, which is faint on white; orange-red comes first and is APO's.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[Any, ...] = ((0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1, 1)), (0, (3, 1, 1, 1, 1, 1)))
_RC: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "path",  # the reader's machine may lack the font
    "svg.hashsalt": "apo",  # the same identifiers every time
}


@contextmanager
def applied() -> Iterator[None]:
    """Draw in this style, regardless of the user's matplotlib settings."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def rendered(figure: Figure, file_format: str, dpi: int = 160) -> bytes:
    """Return a figure as the content of a file, without the date: the same bytes for the same figure.

    Args:
        figure: The figure.
        file_format: ``"png"``, ``"pdf"`` or ``"svg"``.
        dpi: Resolution of a png.
    """
    dates: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    buffer = io.BytesIO()
    with applied():
        figure.savefig(buffer, format=file_format, dpi=dpi, metadata=dates.get(file_format))
    return buffer.getvalue()


def grid(rows: int, columns: int, width: float = 3.4, height: float = 2.7) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure and its axes, row by row.

    Args:
        rows: How many.
        columns: How many.
        width: Inches for a column.
        height: Inches for a row; the legend gets half an inch more.
    """
    figure = Figure(figsize=(width * columns, height * rows + 0.5), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.09, h_pad=0.06)  # type: ignore[union-attr]
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(row) for row in axes]


def line_styles(recipe: Recipe, labels: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return the look of each entry's line: APO's thick and unbroken, the others thin and dashed.

    Args:
        recipe: The recipe, whose order decides.
        labels: The entries that share the axes; all by default.
    """
    chosen = [entry for entry in recipe.entries if labels is None or entry.label in labels]
    ours = [entry for entry in chosen if "apo" in entry.method]
    others = [entry for entry in chosen if entry not in ours]
    styles: dict[str, dict[str, Any]] = {}
    for position, entry in enumerate(ours):
        colour = COLOURS[position % len(COLOURS)]
        styles[entry.label] = {"color": colour, "linestyle": "-", "linewidth": 2.2, "zorder": 3}
    # The first colour is reserved for APO even if APO is not shown.
    for position, entry in enumerate(others):
        colour = COLOURS[(max(len(ours), 1) + position) % len(COLOURS)]
        dashes = _DASHES[position % len(_DASHES)]
        styles[entry.label] = {"color": colour, "linestyle": dashes, "linewidth": 1.5, "zorder": 2}
    return styles


def legend_below(figure: Figure, axes: Axes) -> None:
    """Put the legend of one of the axes under all of them."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))


def scale_axis(axes: Axes, values: Sequence[float], ratio: float = 20.0) -> None:
    """Make the vertical axis logarithmic if the values are positive and span more than ``ratio``."""
    if values and min(values) > 0 and max(values) / min(values) > ratio:
        axes.set_yscale("log")
