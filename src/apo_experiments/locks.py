"""At most one process per run.

The lock is the kernel's (``flock``) on a file in the run's folder: it ends with the process, even if that is killed, so
a file that is left behind does no harm.
"""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from apo_experiments.errors import UserError
from apo_experiments.files import explained

try:
    import fcntl
except ImportError:  # Windows has no flock: there the user has to make sure
    fcntl = None

__all__ = ["locked"]

_HELD = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the run in ``directory`` against other processes.

    Args:
        directory: The run's folder, created if necessary.

    Raises:
        UserError: Another process holds it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with locked(Path(folder)):
        ...         print(sorted(path.name for path in Path(folder).iterdir()))
        ...     print(sorted(path.name for path in Path(folder).iterdir()))
        ['lock']
        []
    """
    path = directory / "lock"
    with explained(path):
        directory.mkdir(parents=True, exist_ok=True)
        handle = _acquire(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock is released: afterwards the file may belong to another process
        os.close(handle)


def _acquire(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle, path)
            if _is_still(path, handle):
                _sign(handle)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its owner deleted the file while we waited: the next attempt creates a new one


def _lock(handle: int, path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _HELD:
            return  # a file system without locks: better to train unguarded than not at all
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another one"
        raise UserError(
            f"{path.parent} is being trained by another process ({holder}): wait for it to end, or end it, "
            "and run the command again."
        ) from error


def _sign(handle: int) -> None:
    """Write who holds the lock; only for information, so a full disk is no reason to fail."""
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()} on {platform.node()}\n".encode())


def _is_still(path: Path, handle: int) -> bool:
    """Return whether the opened file is still the one at this path."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(handle))
