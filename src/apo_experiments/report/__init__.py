"""The report: one self-contained HTML page with every recipe, its figure, its table and how to repeat it."""

from __future__ import annotations

from pathlib import Path

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
    from apo_experiments.errors import UserError
    from apo_experiments.files import write_atomically
    from apo_experiments.recipes import RECIPES
    from apo_experiments.records import find
    from apo_experiments.report.page import page
    from apo_experiments.report.sections import section

    records = find(root, scale=scale)
    sections = [section(recipe, records) for recipe in RECIPES.values()]
    run = sum(bool(part.parts) for part in sections)
    if not run:
        size = f" of scale {scale}" if scale else ""
        raise UserError(f"There are no records{size} in {root}: run `apo run` first, or name their folder with --runs.")
    write_atomically(path, page(sections).encode(), "--out")
    return run
