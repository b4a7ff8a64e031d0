"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from apo_experiments.recipe import Recipe
from apo_experiments.results import Result, figure_text, findings, leader


def show(text: str) -> None:
    """Print a line; a closed output does not stop the command.

    Example:
        >>> show("3 runs")
        3 runs
    """
    with suppress(BrokenPipeError):
        print(text, flush=True)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Align the columns of a table.

    Args:
        header: Names of the columns.
        rows: The cells.
        right: Indices of the columns that are flush right.

    Example:
        >>> print(text_table(["method", "ours"], [["SGDm", "75.6"], ["APO", "7"]], right=[1]))
        method  ours
        ------  ----
        SGDm    75.6
        APO        7
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def comparison(recipe: Recipe, scale: str, results: Sequence[Result]) -> str:
    """Return the table of a recipe: the paper's figures and ours, the best of each with a star.

    Example:
        >>> recipe = Recipe("tiny", "", "Table 2", None, {}, (), {}, (), metric="accuracy", goal="max")
        >>> print(comparison(recipe, "cpu", [Result("SGDm", (75.0, 76.0), paper=75.73), Result("APO", (77.0,))]))
        tiny (Table 2), scale cpu: accuracy, more is better (* the best)
        method   ours   seed to seed    seeds  paper
        ------  ------  --------------  -----  ------
        SGDm    75.50   75.00 to 76.00  2      75.73*
        APO     77.00*                  1           -
        In front here: APO with 77.00; in the paper: SGDm with 75.73.
    """
    best, paper_best = leader(recipe, results), leader(recipe, results, paper=True)
    run = [result for result in results if result.values or result.diverged or result.unfinished]
    rows = [
        [
            result.name,
            figure_text(result.mean) + ("*" if result is best else " "),
            result.spread(),
            str(len(result.values)) + (f" + {result.diverged} diverged" if result.diverged else ""),
            result.paper_text + ("*" if result is paper_best else " "),
        ]
        for result in run
    ]
    title = f"{recipe.name} ({recipe.paper}), scale {scale}: {recipe.metric}, {recipe.better}"
    title += " (* the best)" if best or paper_best else ""
    table = text_table(["method", "ours ", "seed to seed", "seeds", "paper "], rows, right=[1, 4])
    return "\n".join([title, table, *findings(recipe, scale, run)])
