"""Ctrl-C, SIGTERM and a time limit as requests that the training loop handles between two steps.

An exception in the middle of a step would leave weights and optimizer inconsistent, with nothing to save.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final


@final
class TimeIsUp(KeyboardInterrupt):
    """The time limit has passed; everything is saved, and the same command resumes.

    A KeyboardInterrupt, so that the clean-up after Ctrl-C also applies here.
    """


def check_time(deadline: float | None) -> None:
    """Raise :class:`TimeIsUp` at a value of ``time.time()``, whose clock all processes of a machine share."""
    if deadline is not None and time.time() >= deadline:
        raise TimeIsUp


class Interruption:
    """Whether it is time to stop, and why.

    Attributes:
        requested: Set by the first signal.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.requested = False
        self.deadline = deadline

    @property
    def due(self) -> bool:
        """Whether a signal came or time is up."""
        return self.requested or (self.deadline is not None and time.time() >= self.deadline)

    def obey(self) -> None:
        """Raise KeyboardInterrupt if a signal came, TimeIsUp if the time limit has passed."""
        if self.requested:
            raise KeyboardInterrupt
        check_time(self.deadline)


@contextmanager
def interruptible(deadline: float | None = None) -> Iterator[Interruption]:
    """Postpone SIGINT and SIGTERM, and watch a deadline; outside the main thread nothing changes.

    Example:
        >>> import os
        >>> with interruptible() as interruption:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     print(interruption.requested)
        True
    """
    interruption = Interruption(deadline)

    def note(number: int, frame: Any) -> None:
        if interruption.requested:  # a second signal does not wait
            raise KeyboardInterrupt
        interruption.requested = True

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # a background job that was told to ignore it still does
                previous[number] = signal.signal(number, note)
    try:
        yield interruption
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
