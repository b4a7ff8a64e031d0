"""Whether a file on disk is the official one."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from functools import lru_cache
from pathlib import Path

from apo_experiments.data.registry import Checksum, DataFile

_CHUNK = 1 << 20


def digest(path: Path, checksum: Checksum) -> str:
    """Return the digest of a file (or of what a gzip file unpacks to) by the algorithm that ``checksum`` names.

    A file that has not changed since is not read twice by one process: a sweep loads its data once per trial.
    """
    stat = os.stat(path)
    return _digest(str(path), checksum.algorithm, checksum.of_content, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _digest(path: str, algorithm: str, of_content: bool, size: int, modified: int) -> str:
    del size, modified  # part of the key only
    # MD5 protects against accidents here, not against attackers.
    state = hashlib.new(algorithm, usedforsecurity=False)
    opened = gzip.open(path, "rb") if of_content else open(path, "rb")  # noqa: SIM115 (closed by the next line)
    with opened as stream:
        while chunk := stream.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def problem(file: DataFile, path: Path) -> str | None:
    """Return what is wrong with a file on disk, beginning with its path, or None."""
    if not path.is_file():
        return f"{path} is missing"
    try:
        size = path.stat().st_size
        if file.size is not None and size != file.size:
            what = "truncated" if size < file.size else "not the official file"
            return f"{path} is {what} ({size:,} of {file.size:,} bytes)"
        if size == 0:
            return f"{path} is empty"
        if file.checksum is not None and digest(path, file.checksum) != file.checksum.digest:
            return f"{path} is corrupted or another edition (its {file.checksum.algorithm} differs)"
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return f"{path} is truncated or corrupted (it does not unpack)"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror or error})"
    return None
