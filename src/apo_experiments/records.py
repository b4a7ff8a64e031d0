"""The record of a run: ``record.jsonl``, one JSON object per line.

- ``{"kind": "header", "config": {...}, "command": [...], "commit": ..., "versions": {...}, "hardware": {...},
  "started": ...}`` comes first, with ``"chosen_by": {...}`` where validation runs chose the hyperparameters;
- ``{"kind": "row", "step": ..., "epoch": ..., "train_loss": ..., "rate": ..., <metrics>, "seconds": ...}`` after every
  epoch: the mean loss of its steps, then the learning rate and the metrics at its end, and the seconds of training so
  far (without evaluation);
- ``{"kind": "summary", "metrics": {...}, "best": {...}, "seconds": ..., "steps": ..., "diverged": ...,
  "finished": ...}`` at the end, so a run with a summary is a finished one.

Infinite numbers and NaN become ``null``, since JSON has neither.

A run is a point of a sweep, a result, or both. The header has the command that started it; a command that finds it
finished trains nothing, so it adds a note there: ``"run": {"command": [...], "chosen_by": {...}}`` or ``"sweep":
{"command": [...]}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar, final

import torch

from apo_experiments import provenance, renamed
from apo_experiments.errors import UserError
from apo_experiments.files import append, explained, flush_to_disk, write_atomically
from apo_experiments.runs import RunConfig

Thing = TypeVar("Thing")
Key = TypeVar("Key", bound=Hashable)

#: The file's name in a run's folder.
NAME = "record.jsonl"


@dataclass(frozen=True)
class Record:
    """What is known about one run.

    Attributes:
        config: What identifies it.
        header: Its first line: command, commit, versions, hardware, start.
        rows: Its curve.
        summary: Its last line, or None while it is unfinished.
    """

    config: RunConfig
    header: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any] | None

    @property
    def finished(self) -> bool:
        """Whether the run has finished."""
        return self.summary is not None

    @property
    def diverged(self) -> bool:
        """Whether the run has ended because it diverged."""
        return bool((self.summary or {}).get("diverged"))

    @property
    def metrics(self) -> dict[str, Any]:
        """The final metrics; empty while the run is unfinished."""
        return (self.summary or {}).get("metrics") or {}

    @property
    def seconds(self) -> float:
        """How long training took, without evaluation."""
        return (self.summary or {}).get("seconds") or 0.0

    @property
    def is_trial(self) -> bool:
        """Whether a sweep has tried the run, no matter which command trained it."""
        return "sweep" in self.header or _is_sweep(self.header.get("command"))

    @property
    def is_swept(self) -> bool:
        """Whether the run belongs only to a sweep."""
        return "run" not in self.header and _is_sweep(self.header.get("command"))

    @property
    def trial_command(self) -> list[str]:
        """The command of the sweep that has tried the run, or else of the run itself."""
        return list(self.header.get("sweep", self.header).get("command") or [])

    @property
    def chosen_by(self) -> Mapping[str, Any] | None:
        """How the hyperparameters of a result were chosen, if sweeps chose them."""
        return self.header.get("chosen_by") or self.header.get("run", {}).get("chosen_by")


@final
class RecordWriter:
    """Writes the record of one run, or continues an existing one."""

    def __init__(self, directory: Path, config: RunConfig, chosen_by: Mapping[str, Any] | None = None) -> None:
        self.path = directory / NAME
        self.config = config
        self.chosen_by = chosen_by
        try:
            read(self.path)
        except UserError:
            self.truncate_to(0)

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Add rows."""
        append(self.path, b"".join(_line({"kind": "row", **row}) for row in rows))

    def truncate_to(self, step: int) -> list[dict[str, Any]]:
        """Drop all rows after ``step`` and return the others; at 0 the run starts again, with a new header."""
        if step == 0:
            about = provenance.describe(torch.device(self.config.device))
            origin = {"chosen_by": self.chosen_by} if self.chosen_by else {}
            header = {"kind": "header", "config": asdict(self.config), **about, **origin, "started": _now()}
            write_atomically(self.path, _line(header))
            return []
        record = read(self.path)
        rows = [row for row in record.rows if row["step"] <= step]
        write_atomically(self.path, b"".join(map(_line, [record.header, *rows])))
        return rows

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Add the summary, which marks the run as finished."""
        append(self.path, _line({"kind": "summary", **summary, "finished": _now()}))
        self.sync()

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        with explained(self.path):
            flush_to_disk(self.path)


def read(path: Path) -> Record:
    """Read a record.

    A line that a crash has cut off, and everything after it, counts as not written.

    Args:
        path: The file ``record.jsonl``.
    """
    lines = _readable_lines(path)
    try:
        config = RunConfig.from_record(lines[0]["config"])
    except (IndexError, KeyError, TypeError):
        raise UserError(f"{path} is missing or damaged: run its command again.") from None
    rows = renamed.rates_of_today([line for line in lines if line["kind"] == "row"], config.hyper)
    summaries = [line for line in lines if line["kind"] == "summary" and isinstance(line.get("metrics", {}), dict)]
    return Record(config, lines[0], rows, summaries[-1] if summaries else None)


def find(root: Path, recipe: str | None = None, scale: str | None = None) -> list[Record]:
    """Return all records below a folder, finished ones first.

    Args:
        root: The folder of all runs; it need not exist.
        recipe: Only runs of this recipe.
        scale: Only runs of this scale.
    """
    records = []
    for path in sorted(root.glob(f"**/{NAME}")):
        try:
            record = read(path)
        except UserError:
            continue
        if recipe in (None, record.config.recipe) and scale in (None, record.config.scale):
            records.append(record)
    return sorted(records, key=lambda record: not record.finished)


def as_result(record: Record, directory: Path, origin: Mapping[str, Any] | None) -> Record:
    """Note that ``apo run`` includes a run that a sweep had started, and how its hyperparameters were chosen."""
    begun_by_sweep = _is_sweep(record.header.get("command")) and not _is_sweep(provenance.command())
    if begun_by_sweep and ("run" not in record.header or (origin and not record.chosen_by)):
        return _noted(record, directory, "run", {"chosen_by": origin} if origin else {})
    return record


def as_trial(record: Record, directory: Path) -> Record:
    """Note that a sweep includes an existing run."""
    return record if record.is_trial else _noted(record, directory, "sweep", {})


def _noted(record: Record, directory: Path, role: str, facts: Mapping[str, Any]) -> Record:
    note = {"command": provenance.command(), **facts}
    path = directory / NAME
    with suppress(UserError, OSError):  # read-only records work without the note
        first, _, rest = path.read_bytes().partition(b"\n")
        header = {**json.loads(first), role: note}
        write_atomically(path, json.dumps(header).encode() + b"\n" + rest)
    return replace(record, header={**record.header, role: note})


def _is_sweep(command: list[str] | None) -> bool:
    """Look only at the subcommand: a folder may have any name."""
    return next((word for word in (command or [])[1:] if not word.startswith("-")), None) == "sweep"


def grouped(things: Iterable[Thing], key: Callable[[Thing], Key]) -> dict[Key, list[Thing]]:
    """Group records, or anything else, by a key, in the order in which they come."""
    groups: dict[Key, list[Thing]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


def by_label(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by the label of their entry."""
    return grouped(records, lambda record: record.config.label)


def _readable_lines(path: Path) -> list[dict[str, Any]]:
    try:
        content = path.read_bytes()
    except OSError:
        return []
    lines = []
    # What follows the last newline is incomplete even if it happens to be readable.
    for line in content.split(b"\n")[:-1]:
        try:
            parsed = json.loads(line)
        except ValueError:
            break
        if not isinstance(parsed, dict) or "kind" not in parsed:
            break
        lines.append(parsed)
    return lines


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(content), allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Convert ``value`` to what JSON can store."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    # Tensors and numpy values become numbers or lists; anything else, such as a path, becomes its string.
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
