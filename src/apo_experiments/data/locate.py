"""Where the data are, and a clear message if they are missing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from apo_experiments.data import integrity
from apo_experiments.data.registry import Dataset, dataset
from apo_experiments.errors import UserError

__all__ = ["directory", "is_present", "require", "damaged"]


def directory(data_dir: str | Path | None = None) -> Path:
    """Return the data directory: the argument, else ``$APO_DATA``, else ``~/.cache/apo-data``.

    Example:
        >>> directory("somewhere").name
        'somewhere'
    """
    if data_dir is not None:
        return Path(data_dir).expanduser()
    variable = os.environ.get("APO_DATA")
    return Path(variable).expanduser() if variable else Path.home() / ".cache" / "apo-data"


def is_present(name: str, data_dir: str | Path | None = None) -> bool:
    """Return whether all files of a data set exist with the right size, without reading them (for ``apo list``).

    Example:
        >>> is_present("mnist", "no/such/folder")
        False
    """
    root = directory(data_dir)
    for file in dataset(name).files:
        path = root / file.path
        if not path.is_file() or file.size not in (None, path.stat().st_size):
            return False
    return True


def require(name: str, data_dir: str | Path | None = None) -> Path:
    """Return the data directory, after checking that all files of a data set are present with the right checksums.

    Args:
        name: The data set.
        data_dir: Where to look; None as in :func:`directory`.

    Raises:
        UserError: If a file is missing, truncated or corrupted; one sentence with the file and what to do.

    Example:
        >>> require("protein", "no/such/folder")
        Traceback (most recent call last):
        apo_experiments.errors.UserError: The data set protein is not in no...folder (uci...CASP.csv is missing): ...
    """
    entry, root = dataset(name), directory(data_dir)
    missing = [file.path for file in entry.files if not (root / file.path).exists()]
    if missing:
        raise UserError(f"The data set {name} is not in {root} ({_listed(missing)}): {_remedy(entry)}.")
    for file in entry.files:
        trouble = integrity.problem(file, root / file.path)
        if trouble:
            raise UserError(f"{trouble}: {_again(entry)}.")
    return root


def damaged(name: str, path: Path, reason: str) -> UserError:
    """Return the error of a loader that cannot read a file.

    Args:
        name: The data set.
        path: The file.
        reason: What is wrong with it, as in "has 3 of 4 columns".

    Example:
        >>> str(damaged("protein", Path("CASP.csv"), "has no rows"))
        'CASP.csv has no rows: delete it and run `apo data fetch protein` again.'
    """
    return UserError(f"{path} {reason}: {_again(dataset(name))}.")


def _listed(missing: Sequence[str]) -> str:
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return f"{shown} {'is' if len(missing) == 1 else 'are'} missing"


def _remedy(entry: Dataset) -> str:
    elsewhere = "or name another folder with --data-dir or APO_DATA"
    if not entry.sources:
        return f"{entry.by_hand}, {elsewhere}"
    return f"run `apo data fetch {entry.name}`, {entry.by_hand} there, {elsewhere}"


def _again(entry: Dataset) -> str:
    if not entry.sources:
        return f"replace it with an intact copy ({entry.by_hand})"
    return f"delete it and run `apo data fetch {entry.name}` again"
