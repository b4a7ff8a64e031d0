"""Who reads and writes a learning rate: a scheduler of torch, or the training loop itself.

A number does not say where it comes from, and one that did would end up in files. So the place is asked: whether a
scheduler's method is among the callers and, in the training loop, whether the line that writes a rate has read it.
"""

from __future__ import annotations

import math
import sys
from types import CodeType

from torch.optim.lr_scheduler import LRScheduler

__all__ = ["HandWritten", "Place", "place_of_access", "read_by_get_lr", "read_by_optimizer", "writing_scheduler"]

#: How many calls lie at most between a scheduler's method and the access: torch's helpers and a comprehension.
_DEPTH = 5
#: A rate that is written in this many iterations in a row is a schedule.
_IN_A_ROW = 3

_SCHEDULER_MODULES = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")

#: A line of code.
Place = tuple[CodeType, int]


def writing_scheduler() -> LRScheduler | None:
    """Return the scheduler of torch whose method calls the method that calls this function, or None."""
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if isinstance(owner, LRScheduler):
            return owner
        frame = frame.f_back
    return None


def read_by_optimizer() -> bool:
    """Return whether an optimizer of torch calls the method that calls this function: most reads are such."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith("torch.optim.") and name not in _SCHEDULER_MODULES


def read_by_get_lr() -> bool:
    """Return whether a scheduler's ``get_lr`` calls the method that calls this function."""
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name == "get_lr":
            return isinstance(frame.f_locals.get("self"), LRScheduler)
        frame = frame.f_back
    return False


def place_of_access() -> Place | None:
    """Return the line that calls the method that calls this function; None if it is torch's or ours."""
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__", "").startswith(("torch.", "apo.")):
        return None
    return frame.f_code, frame.f_lineno


class HandWritten:
    """Decides what the rates mean that a training loop itself writes into one param group.

    A rate that is written now and then is the rate in force. One that is written in every iteration, or in every epoch
    from the first one on, is a schedule: multiples of the initial rate. Neither holds for one that was made from the
    rate in force (``group["lr"] *= 0.5``).

    Args:
        initial: The rate that the group had at first.
        is_schedule: Whether it is known to be a schedule already.

    Attributes:
        is_schedule: Whether it has turned out to be one.

    Example:
        >>> hand = HandWritten(0.1)
        >>> for rate in (0.09, 0.08):
        ...     _ = hand.is_made_from(0.5, rate, was_read=False)
        ...     hand.note_step()
        >>> hand.is_schedule
        True
    """

    def __init__(self, initial: float, is_schedule: bool = False) -> None:
        self.is_schedule = is_schedule
        self._last = initial  # written by the loop and not made from the rate in force
        self._steps = 0
        self._written = False  # since the last step
        self._in_a_row = 0  # the iterations before this one in which a rate was written
        self._from_the_start = False  # whether one was written before the first step

    def note_step(self) -> None:
        """Take notice of a step of the optimizer."""
        self._in_a_row = self._in_a_row + 1 if self._written else 0
        self._from_the_start |= self._written and not self._steps
        self._written = False
        self._steps += 1

    def is_made_from(self, in_force: float, written: float, was_read: bool) -> bool:
        """Take notice of a rate that is written, and return whether it was made from the rate in force.

        Args:
            in_force: The rate in force.
            written: The rate that is written in its place.
            was_read: Whether the training loop has read the rate in force since the last step, perhaps only for a log.
        """
        if was_read:
            nearness = self._nearness(in_force, written)
            if nearness > 0 or (nearness == 0 and not self.is_schedule):
                self._last = written if self.is_schedule else self._last
                return True
        self._last = written
        self._written = True
        if self._steps and (self._from_the_start or self._in_a_row >= _IN_A_ROW - 1):
            self.is_schedule = True
        return False

    def _nearness(self, in_force: float, written: float) -> int:
        """Return 1 for a rate that is much nearer to the one in force than to the last one written, -1 for the reverse.

        Once the learned rate has moved away from the initial one, both are far apart, and a schedule continues from
        what it wrote last. Before that it hardly matters from which of both a rate is made.
        """
        if in_force == self._last or not min(in_force, written, self._last) > 0:
            return -1
        to_rate_in_force, to_last = abs(math.log(written / in_force)), abs(math.log(written / self._last))
        if 2 * to_rate_in_force < to_last:
            return 1
        return -1 if 2 * to_last < to_rate_in_force else 0
