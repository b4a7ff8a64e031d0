"""Where the data are, whether they are the official ones, and a clear message if not."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from apo_experiments.data.registry import Checksum, DataFile, Dataset, dataset
from apo_experiments.errors import UserError


def directory(data_dir: str | Path | None = None) -> Path:
    """Return the data directory: the argument, else ``$APO_DATA``, else ``~/.cache/apo-data``."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    variable = os.environ.get("APO_DATA")
    return Path(variable).expanduser() if variable else Path.home() / ".cache" / "apo-data"


def state(name: str, data_dir: str | Path | None = None, thorough: bool = False) -> str:
    """Return whether a data set is "here", "missing", "incomplete" (some of its files are missing) or "damaged".

    Only a ``thorough`` look reads the files and compares their checksums; otherwise their sizes count.
    """
    files = [(file, directory(data_dir) / file.path) for file in dataset(name).files]
    present = sum(path.exists() for _, path in files)
    if present < len(files):
        return "incomplete" if present else "missing"
    return "damaged" if any(problem(file, path, thorough) for file, path in files) else "here"


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
        trouble = problem(file, root / file.path)
        if trouble:
            raise UserError(f"{trouble}: {_again(entry)}.")
    return root


class Damaged(Exception):
    """A loader cannot read a file, with a reason as in "has 3 of 4 columns"."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path


@contextmanager
def opened(name: str, kind: str, data_dir: str | Path | None = None) -> Iterator[Path]:
    """Check a data set as :func:`require` does and yield the data directory; say what to do about damaged files.

    Example:
        >>> with opened("protein", "images"):
        ...     pass
        Traceback (most recent call last):
        ...
        apo_experiments.errors.UserError: The data set protein does not consist of images.
    """
    if dataset(name).kind != kind:
        raise UserError(f"The data set {name} does not consist of {kind}.")
    try:
        yield require(name, data_dir)
    except Damaged as error:
        raise UserError(f"{error.path} {error}: {_again(dataset(name))}.") from error


def digest(path: Path, checksum: Checksum) -> str:
    """Return the digest of a file (or of what a gzip file unpacks to) by the algorithm that ``checksum`` names.

    A file that has not changed since is not read twice by one process: a sweep loads its data once per trial.
    """
    stat = os.stat(path)
    return _digest(path, checksum, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _digest(path: Path, checksum: Checksum, size: int, modified: int) -> str:
    del size, modified  # part of the key only
    # MD5 protects against accidents here, not against attackers.
    state = hashlib.new(checksum.algorithm, usedforsecurity=False)
    opened = gzip.open(path, "rb") if checksum.of_content else open(path, "rb")  # noqa: SIM115 (closed by the next line)
    with opened as stream:
        while chunk := stream.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()


def problem(file: DataFile, path: Path, thorough: bool = True) -> str | None:
    """Return what is wrong with a file on disk, beginning with its path, or None; its checksum only if ``thorough``."""
    if not path.is_file():
        return f"{path} is missing"
    try:
        size = path.stat().st_size
        if file.size is not None and size != file.size:
            what = "truncated" if size < file.size else "not the official file"
            return f"{path} is {what} ({size:,} of {file.size:,} bytes)"
        if size == 0:
            return f"{path} is empty"
        if thorough and file.checksum is not None and digest(path, file.checksum) != file.checksum.digest:
            return f"{path} is corrupted or another edition (its {file.checksum.algorithm} differs)"
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return f"{path} is truncated or corrupted (it does not unpack)"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror or error})"
    return None


def _again(entry: Dataset) -> str:
    if not entry.sources:
        return f"replace it with an intact copy ({entry.by_hand})"
    return f"delete it and run `apo data fetch {entry.name}` again"
