"""Extracting named members of an archive, and nothing else.

Nothing is ever extracted to a path that the archive chooses: each wanted member is copied to a path that the
caller chooses. An archive with a path outside of itself, or with a link in place of a wanted file, is
rejected, because it is not the official one.
"""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, cast

__all__ = ["ArchiveError", "unpack"]


class ArchiveError(Exception):
    """An archive that is damaged, unsafe or lacks a member; the message completes "the archive ..."."""


def unpack(archive: Path, kind: str, members: Mapping[str, Path]) -> None:
    """Copy members of an archive to the paths they are given.

    Args:
        archive: The archive.
        kind: ``"gzip"`` (one member, whatever its name), ``"tar"`` (compressed or not) or ``"zip"``.
        members: Target paths by member name; in a zip file the folder of a member does not matter.

    Raises:
        ArchiveError: If the archive is damaged or unsafe, or a member is not in it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with zipfile.ZipFile(folder / "a.zip", "w") as made:
        ...     made.writestr("deep/table.csv", "1,2")
        >>> unpack(folder / "a.zip", "zip", {"table.csv": folder / "out.csv"})
        >>> (folder / "out.csv").read_text()
        '1,2'
    """
    unpackers = {"gzip": _unpack_gzip, "tar": _unpack_tar, "zip": _unpack_zip}
    if kind not in unpackers:
        raise ValueError(f"kind must be one of {', '.join(unpackers)}, got {kind!r}")
    try:
        unpackers[kind](archive, members)
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ArchiveError(f"is damaged ({error})") from error


def _unpack_gzip(archive: Path, members: Mapping[str, Path]) -> None:
    (target,) = members.values()
    with gzip.open(archive) as stream:
        _copy(cast("IO[bytes]", stream), target)


def _unpack_tar(archive: Path, members: Mapping[str, Path]) -> None:
    left = dict(members)
    with tarfile.open(archive) as opened:
        for member in opened:
            _check(member.name)
            target = left.pop(member.name.removeprefix("./"), None)
            if target is None:
                continue
            stream = opened.extractfile(member) if member.isreg() else None
            if stream is None:
                raise ArchiveError(f"has no plain file at {member.name}")
            with stream:
                _copy(stream, target)
    _check_complete(left)


def _unpack_zip(archive: Path, members: Mapping[str, Path]) -> None:
    left = dict(members)
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            _check(member.filename)
            target = left.pop(PurePosixPath(member.filename).name, None)
            if target is not None:
                with opened.open(member) as stream:
                    _copy(stream, target)
    _check_complete(left)


def _check(name: str) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or name[1:2] == ":":
        raise ArchiveError(f"holds the unsafe path {name!r}")


def _check_complete(left: Mapping[str, Path]) -> None:
    if left:
        raise ArchiveError(f"lacks {', '.join(left)}")


def _copy(stream: IO[bytes], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)
