"""How workers detect that another worker has died.

Every worker holds a kernel lock (``flock``) on its own file while it runs. If another worker on the same machine finds
the lock free, the owner is dead. Workers on other machines cannot see the lock. For them every trial has a heartbeat, a
number in the database that its worker increments; a trial whose number has not changed for long enough has lost its
worker. No clocks are compared, so those of the machines may differ.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

from apo_experiments.files import explained

try:
    import fcntl
except ImportError:  # Windows has no flock: there only heartbeats decide
    fcntl = None

__all__ = ["Silences", "beating", "is_gone", "present", "remove_card"]


@contextmanager
def present(folder: Path) -> Iterator[dict[str, Any]]:
    """Register this process as a worker.

    Args:
        folder: Where the workers' lock files are.

    Yields:
        The worker's card: what others need to find out whether it is alive.

    Raises:
        UserError: The folder cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with present(Path(folder)) as card:
        ...         print(is_gone(card, Path(folder)), len(os.listdir(folder)))
        ...     print(len(os.listdir(folder)))
        False 1
        0
    """
    path = folder / f"worker-{uuid.uuid4().hex}"
    with explained(path):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield {"name": path.name, "machine": _machine(), "locked": _try_lock(handle)}
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def is_gone(card: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a worker is certainly dead.

    False does not prove that it is alive: the worker may be on another machine, keep its lock file elsewhere, or have a
    file system without locks.

    Args:
        card: The card of the worker.
        folder: Where the workers' lock files are.
    """
    # Locks on a network file system may be visible to one machine only, so they say nothing about other machines.
    if card.get("machine") != _machine() or not card.get("locked"):
        return False
    try:
        handle = os.open(folder / card["name"], os.O_RDWR)
    except OSError:
        return False
    try:
        return _try_lock(handle)
    finally:
        os.close(handle)


def remove_card(card: Mapping[str, Any], folder: Path) -> None:
    """Delete the files of a dead worker."""
    with suppress(OSError):
        (folder / card["name"]).unlink(missing_ok=True)


@contextmanager
def beating(beat: Callable[[int], None], seconds: float) -> Iterator[None]:
    """Call ``beat`` with 1, 2, 3, ... every few seconds, in a thread.

    Args:
        beat: Writes the number to where others see it. If it fails, the next one may succeed.
        seconds: The time between two beats.

    Example:
        >>> beats = []
        >>> with beating(beats.append, 0.01):
        ...     time.sleep(0.2)
        >>> beats[:3]
        [1, 2, 3]
    """
    over = threading.Event()

    def run() -> None:
        count = 0
        while not over.wait(seconds):
            count += 1
            # A database that is briefly unavailable is no reason to stop or to warn the user.
            with suppress(Exception):
                beat(count)

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@final
class Silences:
    """How long heartbeats have not changed, by the clock of this process.

    Args:
        patience: Seconds without a change after which a worker counts as dead.

    Example:
        >>> silences = Silences(patience=60)
        >>> silences.too_long(7, beat=3, now=0.0), silences.too_long(7, beat=3, now=59.0)
        (False, False)
        >>> silences.too_long(7, beat=4, now=61.0), silences.too_long(7, beat=4, now=122.0)
        (False, True)
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._last: dict[int, tuple[int, float]] = {}

    def too_long(self, key: int, beat: int, now: float | None = None) -> bool:
        """Check one heartbeat; the first check only starts the clock."""
        now = time.monotonic() if now is None else now
        last_beat, since = self._last.get(key, (None, now))
        if last_beat != beat:
            self._last[key] = (beat, now)
            return False
        return now - since > self.patience


def _try_lock(handle: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _machine() -> str:
    """Name the running kernel: containers on one machine share it, and a reboot changes it."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()
