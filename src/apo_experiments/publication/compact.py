"""Compact records: one JSON file per run, one line per column, five digits per number, and no local paths.

The runs that were made to choose hyperparameters have one small file per recipe and scale, with one line per run.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from apo_experiments import renamed
from apo_experiments.errors import UserError
from apo_experiments.files import write_atomically
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record
from apo_experiments.results import value, variant
from apo_experiments.runs import RunConfig
from apo_experiments.tuning import judging_metric

#: Maximum size of a file in bytes. Longer curves keep every second row, every fourth, ...
LIMIT = 150_000

#: Options of the command that concern one machine only (paths, time limits), with the number of words that follow.
_LOCAL = {"--runs": 1, "--data-dir": 1, "--json": 1, "--time-limit": 1, "--storage": 1, "--debug": 0}
_ABOUT = ("command", "commit", "versions", "hardware", "chosen_by", "started")
#: The file of the runs that were made to choose hyperparameters.
_LOG = "tuning.jsonl"


def path_of(config: RunConfig, folder: Path) -> Path:
    """Return the path of the compact record of a run.

    Example:
        >>> path_of(RunConfig("r", "SGD", "sgd", "paper", seed=0, epochs=1), Path("results")).parent.as_posix()
        'results/r/paper'
    """
    return folder / config.recipe / config.scale / f"{config.label}-seed{config.seed}-{config.identity()}.json"


def write(record: Record, folder: Path) -> Path:
    """Write a compact record and return its path, unless a record of the same run is there, which stays.

    Args:
        record: A record of a finished run.
        folder: The folder of all compact records.

    Raises:
        UserError: The folder cannot be written.
    """
    path = path_of(record.config, folder)
    if (known := existing(record.config, folder)) is not None:
        return known
    step = 1
    while len(text := lines(content(record, step)).encode()) > LIMIT and step < len(record.rows):
        step *= 2
    write_atomically(path, text, "--to")
    return path


def existing(config: RunConfig, folder: Path) -> Path | None:
    """Return the compact record of a run, or None if there is none.

    The file may have another name: its name has a hash of all settings, and later versions have more of them.
    """
    path, wanted = path_of(config, folder), variant(config)
    if path.exists():
        return path
    others = path.parent.glob(f"{glob.escape(config.label)}-seed{config.seed}-*.json")
    return next((other for other in sorted(others) if variant(read(other).config) == wanted), None)


def content(record: Record, step: int = 1) -> dict[str, Any]:
    """Return the content of the file. Of the rows it keeps every ``step``-th, counted back from the last.

    Example:
        >>> config = RunConfig("r", "SGD", "sgd", "paper", seed=0, epochs=2)
        >>> rows = [{"kind": "row", "step": 1, "train_loss": 1 / 3}, {"kind": "row", "step": 2, "train_loss": 0.25}]
        >>> content(Record(config, {}, rows, {}))["columns"]
        {'step': [1, 2], 'train_loss': [0.33333, 0.25]}
    """
    # If a trial of a sweep became a result, show the command that made it one.
    header = {**record.header, **record.header.get("run", {})}
    about = {key: header[key] for key in _ABOUT if key in header}
    if "command" in about:
        about["command"] = clean_command(about["command"] or [])
    if about.get("chosen_by"):
        commands = {tuple(clean_command(words)): None for words in about["chosen_by"].get("commands", [])}
        about["chosen_by"] = {**about["chosen_by"], "commands": [list(words) for words in commands]}
    kept = record.rows[::-1][::step][::-1]
    names = dict.fromkeys(name for row in kept for name in row if name != "kind")
    columns = {name: [row.get(name) for row in kept] for name in names}
    summary = {key: value for key, value in (record.summary or {}).items() if key != "kind"}
    # Settings are not rounded: rounded settings would be those of another run.
    return {"config": asdict(record.config), **rounded({**about, "summary": summary, "columns": columns})}


def lines(whole: dict[str, Any]) -> str:
    """Write JSON with one line per key and per column, which is easy to read and to diff."""
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in whole.items() if key != "columns"]
    columns = [f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in whole.get("columns", {}).items()]
    parts.append('"columns": {\n' + ",\n".join(columns) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read(path: Path) -> Record:
    """Read a compact record.

    Raises:
        UserError: The file is not a compact record.

    Example:
        >>> import tempfile
        >>> config = RunConfig("r", "SGD", "sgd", "paper", seed=0, epochs=1)
        >>> record = Record(config, {}, [{"kind": "row", "step": 1}], {"kind": "summary", "metrics": {"loss": 1.0}})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = read(write(record, Path(folder)))
        >>> again.config == config, again.rows, again.summary["metrics"]
        (True, [{'kind': 'row', 'step': 1}], {'loss': 1.0})
    """
    try:
        return record_of(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path} is not a compact record ({type(error).__name__}): publish its run again.") from error


def record_of(whole: dict[str, Any]) -> Record:
    """Return the record that :func:`content` was made of, but for what it left out."""
    config = RunConfig.from_record(whole["config"])
    header = {"kind": "header", **{key: whole[key] for key in ("config", *_ABOUT) if key in whole}}
    columns = whole["columns"]
    rows = [
        {"kind": "row", **{name: value for name, value in zip(columns, values, strict=True) if value is not None}}
        for values in zip(*columns.values(), strict=True)
    ]
    return Record(config, header, renamed.rates_of_today(rows, config.hyper), {"kind": "summary", **whole["summary"]})


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one in each line, or none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]], option: str = "--to") -> None:
    """Write a file with one object in each line."""
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode(), option)


def find(folder: Path) -> list[Record]:
    """Return all compact records below a folder, or none if it does not exist.

    Raises:
        UserError: A file is not a compact record.
    """
    return [read(path) for path in sorted(folder.glob("*/*/*-seed*.json"))]


def is_tuning(record: Record) -> bool:
    """Return whether a run was made to choose hyperparameters, and is therefore not a result."""
    return bool(record.config.options.get("validation")) or record.is_swept


def finals(records: Sequence[Record]) -> list[Record]:
    """Return the runs that are results.

    A run of a sweep without held-out data counts if other results have the same settings: it is their first seed.
    """
    settings = {variant(record.config) for record in records if not is_tuning(record)}
    return [record for record in records if variant(record.config) in settings]


def log_tuning(recipe: Recipe, scale: str, records: Sequence[Record], folder: Path) -> Path | None:
    """Add runs to the log of a recipe. Runs that are already in the log stay as they are.

    Args:
        recipe: The recipe.
        scale: The scale.
        records: All records.
        folder: The folder of all compact records.

    Returns:
        The file, or None if there is nothing to log.
    """
    own = [r for r in records if (r.config.recipe, r.config.scale) == (recipe.name, scale) and r.finished]
    new = {record.config.identity(): _line(recipe, record) for record in own if is_tuning(record) or record.is_trial}
    if not new:
        return None
    path = folder / recipe.name / scale / _LOG
    known = {line["run"]: line for line in read_tuning(folder, recipe.name, scale)}
    merged = sorted({**new, **known}.values(), key=lambda line: (line["method"], line["epochs"], line["run"]))
    write_lines(path, merged)
    return path


def read_tuning(folder: Path, recipe: str, scale: str) -> list[dict[str, Any]]:
    """Return the lines of a log, or none if it does not exist."""
    return read_lines(folder / recipe / scale / _LOG)


def _line(recipe: Recipe, record: Record) -> dict[str, Any]:
    config = record.config
    metric = judging_metric(recipe, record)
    about = {
        "run": config.identity(),
        "method": config.label,
        "seed": config.seed,
        "epochs": config.epochs,
        "metric": metric,
        "value": value(record, metric),
        "seconds": (record.summary or {}).get("seconds"),
        "hyper": dict(config.hyper),
        "command": clean_command(record.trial_command),
    }
    return rounded(about)


def clean_command(words: Sequence[str]) -> list[str]:
    """Return a command line without the paths of this machine.

    Example:
        >>> clean_command(["__main__.py", "run", "x", "--data-dir", "/home/me/data", "--jobs", "2", "--debug"])
        ['apo', 'run', 'x', '--jobs', '2']
    """
    found: list[str] = ["apo"] if words else []
    rest = list(words[1:])
    while rest:
        word = rest.pop(0)
        if word.partition("=")[0] in _LOCAL:
            del rest[: 0 if "=" in word else _LOCAL[word]]
        else:
            found.append(Path(word).name if word.startswith("/") else word)
    return found


def rounded(value: Any) -> Any:
    """Round all numbers in nested lists and dictionaries to five digits.

    Example:
        >>> rounded({"a": [1 / 3, 2, None]})
        {'a': [0.33333, 2, None]}
    """
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
