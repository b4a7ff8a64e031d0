"""The purpose of a run: a point of a sweep, a result, or both.

The header of a record has the command that started the run. A command that finds it finished trains nothing, so it adds
a note there: ``"run": {"command": [...], "chosen_by": {...}}`` or ``"sweep": {"command": [...]}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from apo_experiments import provenance
from apo_experiments.errors import UserError
from apo_experiments.files import write_atomically
from apo_experiments.records import NAME, Record


def is_trial(record: Record) -> bool:
    """Return whether a sweep has tried a run, no matter which command trained it."""
    return "sweep" in record.header or _is_sweep(record.header.get("command"))


def is_swept(record: Record) -> bool:
    """Return whether a run belongs only to a sweep."""
    return "run" not in record.header and _is_sweep(record.header.get("command"))


def trial_command(record: Record) -> list[str]:
    """Return the command of the sweep that has tried a run, or else of the run itself."""
    return list(record.header.get("sweep", record.header).get("command") or [])


def chosen_by(record: Record) -> Mapping[str, Any] | None:
    """Return how the hyperparameters of a result were chosen, if sweeps chose them."""
    return record.header.get("chosen_by") or record.header.get("run", {}).get("chosen_by")


def as_result(record: Record, directory: Path, origin: Mapping[str, Any] | None) -> Record:
    """Note that ``apo run`` includes a run that a sweep had started, and how its hyperparameters were chosen."""
    begun_by_sweep = _is_sweep(record.header.get("command")) and not _is_sweep(provenance.command())
    if begun_by_sweep and ("run" not in record.header or (origin and not chosen_by(record))):
        return _noted(record, directory, "run", {"chosen_by": origin} if origin else {})
    return record


def as_trial(record: Record, directory: Path) -> Record:
    """Note that a sweep includes an existing run."""
    return record if is_trial(record) else _noted(record, directory, "sweep", {})


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
