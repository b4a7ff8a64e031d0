"""Where the data are, and a clear message if they are missing."""

from __future__ import annotations

import os
from pathlib import Path

from apo_experiments.data import integrity
from apo_experiments.data.registry import Dataset, dataset
from apo_experiments.errors import UserError


def directory(data_dir: str | Path | None = None) -> Path:
    """Return the data directory: the argument, else ``$APO_DATA``, else ``~/.cache/apo-data``."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    variable = os.environ.get("APO_DATA")
    return Path(variable).expanduser() if variable else Path.home() / ".cache" / "apo-data"


def state(name: str, data_dir: str | Path | None = None, thorough: bool = False) -> str:
    """Return whether a data set is "here", "missing", "incomplete" (some of its files are missing) or "damaged".

    Args:
        name: The data set.
        data_dir: Where to look; None as in :func:`directory`.
        thorough: Whether to read the files and compare their checksums; otherwise only their sizes count.
    """
    files = [(file, directory(data_dir) / file.path) for file in dataset(name).files]
    present = sum(path.exists() for _, path in files)
    if present < len(files):
        return "incomplete" if present else "missing"
    if thorough:
        return "damaged" if any(integrity.problem(file, path) for file, path in files) else "here"
    sizes = [(file.size, path.stat().st_size if path.is_file() else -1) for file, path in files]
    return "damaged" if any(size < 1 or wanted not in (None, size) for wanted, size in sizes) else "here"


def require(name: str, data_dir: str | Path | None = None) -> Path:
    """Return the data directory, after checking that all files of a data set are present with the right checksums."""
    entry, root = dataset(name), directory(data_dir)
    missing = [file.path for file in entry.files if not (root / file.path).exists()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        shown += " is missing" if len(missing) == 1 else " are missing"
        remedy = f"run `apo data fetch {name}`, {entry.by_hand} there" if entry.sources else entry.by_hand
        raise UserError(
            f"The data set {name} is not in {root} ({shown}): {remedy}, or name another folder with --data-dir or "
            "APO_DATA."
        )
    for file in entry.files:
        trouble = integrity.problem(file, root / file.path)
        if trouble:
            raise UserError(f"{trouble}: {_again(entry)}.")
    return root


def damaged(name: str, path: Path, reason: str) -> UserError:
    """Return the error of a loader that cannot read a file, with a reason as in "has 3 of 4 columns".

    Example:
        >>> str(damaged("protein", Path("CASP.csv"), "has no rows"))
        'CASP.csv has no rows: delete it and run `apo data fetch protein` again.'
    """
    return UserError(f"{path} {reason}: {_again(dataset(name))}.")


def _again(entry: Dataset) -> str:
    if not entry.sources:
        return f"replace it with an intact copy ({entry.by_hand})"
    return f"delete it and run `apo data fetch {entry.name}` again"
