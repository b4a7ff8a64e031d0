"""Records of the benchmark: one file for a task at a scale, one line for a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from apo_experiments.publication import compact
from apo_experiments.recipes.no_tuning import FAMILY
from apo_experiments.records import Record, grouped
from apo_experiments.runs import RunConfig

#: Columns of the curves that are kept; what APO reports beside them is not, to keep files small.
_KEPT = ("step", "epoch", "train_loss", "rate", "seconds", "guess")
#: At most so many rows of a curve.
_ROWS = 30


def path_of(recipe: str, scale: str, folder: Path) -> Path:
    """Return the file of a task.

    Example:
        >>> path_of("no-tuning-protein", "cpu", Path("results")).as_posix()
        'results/no-tuning/cpu/protein.jsonl'
    """
    return folder / FAMILY / scale / f"{recipe.removeprefix(f'{FAMILY}-')}.jsonl"


def archive(records: Iterable[Record], folder: Path) -> list[Path]:
    """Add finished runs to the files of their tasks; a run that is known already is replaced.

    Args:
        records: Runs of any tasks of the benchmark.
        folder: The folder of all compact records.

    Returns:
        The files that were written.
    """
    files = grouped(
        [record for record in records if record.finished],
        lambda record: path_of(record.config.recipe, record.config.scale, folder),
    )
    for path, own in files.items():
        runs = {RunConfig.from_record(line["config"]).identity(): line for line in compact.read_lines(path)}
        runs |= {record.config.identity(): _content(record) for record in own}
        order = sorted(runs.values(), key=lambda run: (run["config"]["label"], run["config"]["seed"]))
        compact.write_lines(path, order)
    return list(files)


def read(folder: Path) -> list[Record]:
    """Return all records of the benchmark below the folder of compact records."""
    files = sorted((folder / FAMILY).glob("*/*.jsonl"))
    return [compact.record_of(line) for path in files for line in compact.read_lines(path)]


def _content(record: Record) -> dict[str, Any]:
    whole = compact.content(record, step=1 + max(0, len(record.rows) - 1) // _ROWS)
    kept = {name: whole["columns"][name] for name in whole["columns"] if name in _KEPT or name.startswith("test_")}
    summary = {key: value for key, value in whole["summary"].items() if key != "best"}
    metrics = {name: value for name, value in summary.get("metrics", {}).items() if not name.startswith("apo/")}
    return {**whole, "summary": {**summary, "metrics": metrics}, "columns": kept}
