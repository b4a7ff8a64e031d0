"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress


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
