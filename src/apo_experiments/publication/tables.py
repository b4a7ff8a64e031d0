"""Small pieces of Markdown that the tables of results share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from apo_experiments.publication.rows import Row
from apo_experiments.records import Record

#: Columns of text; all others hold numbers and are aligned to the right.
_TEXT = ("Experiment", "Method", "Metric", "With")


def grid(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---" if name in _TEXT else "--:" for name in header], *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def words(metric: str) -> str:
    """Return the name of a metric as text."""
    return metric.replace("_", " ")


def anchor(heading: str) -> str:
    """Return the address of a heading within its page, as both the site and GitHub build it."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def machines(records: Iterable[Record]) -> str:
    """Return where runs were made: devices, versions of torch and commits."""
    facts = dict.fromkeys(
        f"{(header.get('hardware') or {}).get('device', 'unknown')}, "
        f"torch {(header.get('versions') or {}).get('torch', 'unknown')}, "
        f"commit {str(header.get('commit') or 'unknown')[:10]}"
        for header in (record.header for record in records)
    )
    return "; ".join(facts)


def seeds(row: Row) -> str:
    """Return the number of seeds, and of those that diverged."""
    result = row.result
    return f"{len(result.values)}" + (f" + {result.diverged} diverged" if result.diverged else "")


def spread(row: Row) -> str:
    """Return the standard deviation over the seeds; nothing for a single one."""
    return "" if row.spread is None else f"± {row.spread:.2g}"
