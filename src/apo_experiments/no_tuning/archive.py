"""Records of the benchmark: one file for a task at a scale, one line for a run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from apo_experiments.files import write_atomically
from apo_experiments.publication import compact
from apo_experiments.recipes.no_tuning import FAMILY
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig

__all__ = ["archive", "path_of", "read"]

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
    files: dict[Path, dict[str, dict[str, Any]]] = {}
    for record in records:
        if record.finished:
            path = path_of(record.config.recipe, record.config.scale, folder)
            if path not in files:
                files[path] = {RunConfig.from_record(line["config"]).identity(): line for line in _lines(path)}
            files[path][record.config.identity()] = _content(record)
    for path, runs in files.items():
        ordered = sorted(runs.values(), key=lambda run: (run["config"]["label"], run["config"]["seed"]))
        write_atomically(path, "".join(json.dumps(run) + "\n" for run in ordered).encode(), "--to")
    return list(files)


def read(folder: Path) -> list[Record]:
    """Return all records of the benchmark below the folder of compact records."""
    return [_record(line) for path in sorted((folder / FAMILY).glob("*/*.jsonl")) for line in _lines(path)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _content(record: Record) -> dict[str, Any]:
    whole = compact.content(record, step=1 + max(0, len(record.rows) - 1) // _ROWS)
    kept = {name: whole["columns"][name] for name in whole["columns"] if name in _KEPT or name.startswith("test_")}
    summary = {key: value for key, value in whole["summary"].items() if key != "best"}
    metrics = {name: value for name, value in summary.get("metrics", {}).items() if not name.startswith("apo/")}
    return {**whole, "summary": {**summary, "metrics": metrics}, "columns": kept}


def _record(line: dict[str, Any]) -> Record:
    columns = line["columns"]
    count = len(next(iter(columns.values()), []))
    rows = [{"kind": "row", **{name: values[i] for name, values in columns.items()}} for i in range(count)]
    header = {key: value for key, value in line.items() if key not in ("columns", "summary")}
    return Record(RunConfig.from_record(line["config"]), header, rows, {"kind": "summary", **line["summary"]})
