"""Ctrl-C and SIGTERM as a wish that the training loop grants between two steps.

An exception in the middle of a step would leave weights and optimizer at odds, and nothing worth saving.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Interruption", "interruptible"]


class Interruption:
    """Whether somebody asked to stop.

    Attributes:
        requested: Set by the first signal.

    Example:
        >>> Interruption().requested
        False
    """

    def __init__(self) -> None:
        self.requested = False

    def on_signal(self, number: int, frame: Any) -> None:
        """Note the first signal; a second one does not wait.

        Raises:
            KeyboardInterrupt: On the second signal.
        """
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Note SIGINT and SIGTERM instead of obeying them at once; outside the main thread nothing changes.

    Example:
        >>> import os
        >>> with interruptible() as interruption:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     print(interruption.requested)
        True
    """
    interruption = Interruption()
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # a background job that was told to ignore it still does
                previous[number] = signal.signal(number, interruption.on_signal)
    try:
        yield interruption
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
