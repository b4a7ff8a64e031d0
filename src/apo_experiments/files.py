"""Writing to disk so that a crash or a full disk leaves either the old content or the new, never a part."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from apo_experiments.errors import UserError

#: What the system reports when the disk is full.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def explained(path: Path, option: str = "--runs") -> Iterator[None]:
    """Turn a failure to write ``path`` into one sentence.

    Raises:
        UserError: What the system reported, and what to do about it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise UserError(
                f"{path} cannot be written because the disk is full: free some space and run the same command again."
            ) from error
        reason = error.strerror or str(error)
        raise UserError(
            f"{path} cannot be written ({reason}): fix that or choose another place with {option}."
        ) from error


def write_atomically(path: Path, content: bytes | memoryview, option: str = "--runs") -> None:
    """Replace the content of ``path`` atomically, even if the power fails, and create its folders.

    The content is written to a temporary file next to it, flushed to the disk, and then renamed. A link stays a link,
    and its target is replaced. Anything but a regular file, such as a pipe, is written directly.

    Raises:
        UserError: The disk is full or cannot be written; the old file is kept, and no temporary one is left.
    """
    with explained(path, option):
        if path.exists() and not path.is_file():
            _write_all(path, content, 0, flush=False)
            return
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        temporary = _temporary(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_all(temporary, content, os.O_TRUNC)
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        flush_to_disk(target.parent)


def append(path: Path, content: bytes) -> None:
    """Append to a file that exists; if that fails, it is unchanged (a process that is killed may leave a part).

    Raises:
        UserError: The disk is full or cannot be written.
    """
    with explained(path):
        length = path.stat().st_size
        try:
            _write_all(path, content, os.O_APPEND, flush=False)
        except BaseException:
            with suppress(OSError):
                os.truncate(path, length)
            raise


def remove(path: Path) -> None:
    """Delete a file, and temporary files of processes that were killed while writing it.

    Raises:
        UserError: The folder cannot be written.
    """
    with explained(path):
        for file in (path, _temporary(path)):
            file.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Wait until a file or a folder is on the disk, if the system supports that."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return  # some systems cannot open folders
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in FULL or error.errno == errno.EIO:
            raise
    finally:
        os.close(handle)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _write_all(path: Path, content: bytes | memoryview, mode: int, flush: bool = True) -> None:
    """Write without Python's buffers, which would try a failed write again when they are closed."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o644)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(handle, rest) :]
        if flush:
            os.fsync(handle)
    finally:
        os.close(handle)
