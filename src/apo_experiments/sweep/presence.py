"""How workers detect that another worker has died.

Every worker holds a kernel lock on its own file while it runs. If another worker on this machine finds the lock free,
the owner is dead. Workers on other machines cannot see the lock. For them every trial has a heartbeat, a number in the
database that its worker increments; a trial whose number has not changed for long enough has lost its worker. No clocks
are compared, so those of the machines may differ.

Not Optuna's heartbeats: they end with the first error of the database, they never free a trial whose worker died before
the first of them, and they know nothing of locks, so a sweep that was killed would wait before it resumes.
"""

from __future__ import annotations

import os
import platform
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from apo_experiments.locks import locked, try_lock


@contextmanager
def present(folder: Path) -> Iterator[dict[str, Any]]:
    """Register this process as a worker, with a lock file in ``folder``.

    Yields:
        The worker's card: what others need to find out whether it is alive.
    """
    path = folder / f"worker-{uuid.uuid4().hex}"
    with locked(path) as own:
        yield {"name": path.name, "machine": _machine(), "locked": own}


def is_gone(card: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a worker is certainly dead; False does not prove that it is alive.

    It may be on another machine, keep its lock file elsewhere, or have a file system without locks. Locks on a network
    file system may be visible to one machine only, so they say nothing about other machines.
    """
    if card.get("machine") != _machine() or not card.get("locked"):
        return False
    try:
        handle = os.open(folder / card["name"], os.O_RDWR)
    except OSError:
        return False
    try:
        return bool(try_lock(handle))
    finally:
        os.close(handle)


@contextmanager
def beating(beat: Callable[[int], None], seconds: float) -> Iterator[None]:
    """Call ``beat`` with 1, 2, 3, ... every few seconds, in a thread; if one fails, the next one may succeed."""
    over = threading.Event()

    def run() -> None:
        count = 0
        while not over.wait(seconds):
            count += 1
            with suppress(Exception):  # a database that is briefly unavailable is no reason to stop or to warn the user
                beat(count)

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _machine() -> str:
    """Name the running kernel: containers on one machine share it, and a reboot changes it."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()
