"""The report: one self-contained HTML page with every recipe, its figure, its table and how to repeat it.

``page.html`` is its template, and :mod:`~apo_experiments.report.sections` has what it says about each recipe.
Nothing on it comes from elsewhere: no script, no font and no picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import jinja2

from apo_experiments.errors import UserError
from apo_experiments.figures.curves import axis_name
from apo_experiments.files import write_atomically
from apo_experiments.progress import counted, duration
from apo_experiments.recipe import NOT_IN_PAPER
from apo_experiments.recipes import RECIPES
from apo_experiments.records import find
from apo_experiments.report.sections import Section, section
from apo_experiments.results import MARK, figure_text, leader

__all__ = ["write"]


def write(path: Path, root: Path, scale: str | None = None) -> int:
    """Write the page from the records alone.

    Args:
        path: The file.
        root: The folder of all runs.
        scale: Only runs of this scale.

    Returns:
        How many recipes have results.

    Raises:
        UserError: There are no records (a page that is there stays as it is), or the file cannot be written.
    """
    records = find(root, scale=scale)
    sections = [section(recipe, records) for recipe in RECIPES.values()]
    run = sum(bool(part.parts) for part in sections)
    if not run:
        size = f" of scale {scale}" if scale else ""
        raise UserError(f"There are no records{size} in {root}: run `apo run` first, or name their folder with --runs.")
    write_atomically(path, _page(sections).encode(), "--out")
    return run


def _page(sections: Sequence[Section]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.globals |= {"MARK": MARK, "NOT_IN_PAPER": NOT_IN_PAPER, "axis_name": axis_name, "counted": counted}
    environment.globals |= {"duration": duration, "figure_text": figure_text, "leader": leader}
    methods = {(one.recipe.name, entry.label): entry.method for one in sections for entry in one.recipe.entries}
    today = datetime.now(timezone.utc).strftime("%d %B %Y").lstrip("0")
    return environment.get_template("page.html").render(sections=sections, methods=methods, today=today)
