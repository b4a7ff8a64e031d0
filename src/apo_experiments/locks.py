"""At most one process per run, and signs of life of the workers of a sweep.

The lock is the kernel's (``flock``): it ends with the process, even if that is killed, so a file that is left behind is
harmless. Not the package filelock: it leaves a file in the folder of every run, cannot name the holder, and refuses
file systems without locks, on which it is better to train unguarded than not at all.
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

_HELD = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}


def try_lock(handle: int) -> bool | None:
    """Lock an open file; False if another process holds it, None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _HELD else None
    return True


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock a file, which is created with its folders and deleted at the end, against other processes.

    Yields:
        Whether it is locked; False where there are no locks.

    Raises:
        UserError: Another process trains the run in that folder.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            own = try_lock(handle)
            if own is False:
                holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another one"
                os.close(handle)
                raise UserError(
                    f"{path.parent} is being trained by another process ({holder}): wait for it to end, or end it, "
                    "and run the command again."
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(handle)):
                    break
            os.close(handle)  # its owner deleted the file before we had the lock: the next attempt creates a new one
    with suppress(OSError):  # only for information, so a full disk is no reason to fail
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()} on {platform.node()}\n".encode())
    try:
        yield bool(own)
    finally:
        path.unlink(missing_ok=True)  # before the lock is released: afterwards the file may belong to another process
        os.close(handle)
