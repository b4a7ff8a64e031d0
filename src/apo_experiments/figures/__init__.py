"""Figures, drawn from records alone.

A figure is a function ``(records, recipe) -> matplotlib.figure.Figure``; a recipe names it in ``Recipe.figure``:

- ``curves``: training loss, metric and learning rate over epochs;
- ``bars``: the final metric of each method beside the paper's;
- ``ablation``: one row for each option that differs between the entries;
- ``rosenbrock``: loss and rate over steps, and the path (columns ``x`` and ``y`` of the rows) on the contours;
- ``figure-1``: curves of 1-D regression (see :mod:`apo_experiments.figures.figure_1` for the rows).

To add one, write a file with such a function and a line in :data:`FIGURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from apo_experiments.errors import UserError
from apo_experiments.figures.ablation import ablation
from apo_experiments.figures.bars import bars
from apo_experiments.figures.curves import curves
from apo_experiments.figures.figure_1 import figure_1
from apo_experiments.figures.rosenbrock import rosenbrock
from apo_experiments.figures.style import applied, rendered
from apo_experiments.files import write_atomically
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record

__all__ = ["FIGURES", "draw", "png", "rendered", "save"]

#: The function of each figure.
FIGURES: dict[str, Callable[[Sequence[Record], Recipe], Figure]] = {
    "curves": curves,
    "bars": bars,
    "ablation": ablation,
    "rosenbrock": rosenbrock,
    "figure-1": figure_1,
}


def draw(recipe: Recipe, records: Sequence[Record], name: str | None = None) -> Figure:
    """Draw the figure of a recipe.

    Args:
        recipe: The recipe.
        records: Runs with one setting for each label, at one scale.
        name: A figure other than the recipe's own.

    Raises:
        UserError: There is no such figure.

    Example:
        >>> from apo_experiments.recipe import Entry
        >>> from apo_experiments.runs import RunConfig
        >>> recipe = Recipe("r", "", "", None, {}, (), {}, (Entry("SGD", "sgd"),), metric="loss", goal="min")
        >>> rows = [{"epoch": 1, "train_loss": 0.5, "rate": 0.1}, {"epoch": 2, "train_loss": 0.4, "rate": 0.1}]
        >>> figure = draw(recipe, [Record(RunConfig("r", "SGD", "sgd", "cpu", seed=0, epochs=2), {}, rows, None)])
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['training loss', 'learning rate']
    """
    name = name or recipe.figure
    if name not in FIGURES:
        raise UserError(f"There is no figure {name!r}: choose one of {', '.join(FIGURES)}.")
    with applied():
        return FIGURES[name](records, recipe)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Save a figure as png and pdf and return the two paths.

    Raises:
        UserError: The folder cannot be written.
    """
    paths = [folder / f"{name}.png", folder / f"{name}.pdf"]
    for path in paths:
        write_atomically(path, rendered(figure, path.suffix[1:]), "--out")
    return paths


def png(figure: Figure) -> bytes:
    """Return a figure as PNG for the web: for long curves a fraction of the size of SVG."""
    return rendered(figure, "png", dpi=100)
