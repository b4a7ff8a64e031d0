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
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any


class ArchiveError(Exception):
    """An archive that is damaged, unsafe or lacks a member; the message completes "the archive ..."."""


def unpack(archive: Path, kind: str, members: Mapping[str, Path]) -> None:
    """Copy members of an archive to the paths they are given.

    A ``"gzip"`` file has one member, whatever its name; a ``"tar"`` may be compressed or not; in a ``"zip"`` the folder
    of a member does not matter.
    """
    left = dict(members)
    try:
        for name, stream in _content(archive, kind, members):
            path = PurePosixPath(name.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts or name[1:2] == ":":
                raise ArchiveError(f"holds the unsafe path {name!r}")
            target = left.pop(path.name if kind == "zip" else name.removeprefix("./"), None)
            if target is None:
                continue
            if stream is None:
                raise ArchiveError(f"has no plain file at {name}")
            with stream:
                _copy(stream, target)
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ArchiveError(f"is damaged ({error})") from error
    if left:
        raise ArchiveError(f"lacks {', '.join(left)}")


def _content(archive: Path, kind: str, members: Mapping[str, Path]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each member and its stream, None for what is no plain file."""
    if kind == "gzip":
        with gzip.open(archive) as stream:
            yield next(iter(members)), stream
    elif kind == "tar":
        with tarfile.open(archive) as tar:
            yield from ((member.name, tar.extractfile(member) if member.isreg() else None) for member in tar)
    else:
        with zipfile.ZipFile(archive) as opened:
            yield from ((member.filename, opened.open(member)) for member in opened.infolist())


def _copy(stream: IO[bytes], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)
