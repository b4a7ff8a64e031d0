"""The report: one self-contained HTML page with every recipe, its figure, its table and how to repeat it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write"]


def write(path: Path, root: Path, scale: str | None = None) -> int:
    """Write the page from the records alone.

    Args:
        path: The file.
        root: The folder of all runs; it may be empty.
        scale: Only runs of this scale.

    Returns:
        How many recipes have results.

    Raises:
        UserError: The file cannot be written, or matplotlib is missing.
    """
    from apo_experiments.files import write_atomically
    from apo_experiments.recipes import RECIPES
    from apo_experiments.records import find
    from apo_experiments.report.page import page
    from apo_experiments.report.sections import section

    records = find(root, scale=scale)
    sections = [section(recipe, records) for recipe in RECIPES.values()]
    write_atomically(path, page(sections).encode(), "--out")
    return sum(bool(part.parts) for part in sections)
