"""Who reads and writes a learning rate: a scheduler of torch, or the training loop itself.

A number does not say where it comes from, and one that did would end up in files. So the place is asked: whether a
scheduler's method is among the callers and, in the training loop, whether the line that writes a rate has read it.
"""

from __future__ import annotations

import sys
from types import CodeType

from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Place", "meaning_of_schedule", "place_of_access", "read_by_get_lr", "writing_scheduler"]

#: How many calls lie at most between a scheduler's method and the access: torch's helpers and a comprehension.
_DEPTH = 5

#: A line of code.
Place = tuple[CodeType, int]

#: A first written rate that is this many times the initial one, or such a part of it, belongs to another peak.
_FAR = 5.0


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


def meaning_of_schedule(initial: float, last: float, written: float) -> str:
    """Return how a schedule is read that the training loop writes by hand, and what to do.

    Args:
        initial: The rate with which the optimizer was built.
        last: The rate that the loop wrote before.
        written: The rate that it writes now.

    Example:
        >>> "with lr=0.001, but" in meaning_of_schedule(0.001, 0.1, 0.0999), "but" in meaning_of_schedule(0.1, 0.1, 0.1)
        (True, False)
    """
    # A warm-up may start far below its peak.
    if written > _FAR * initial or (written * _FAR < initial and written <= last):
        return (
            f"optimizer was built with lr={initial:g}, but the training loop writes rates such as {written:g} into "
            f"param_groups[i]['lr']: build the optimizer with the schedule's peak, because apo reads them as a "
            f"multiple of the initial rate, which makes the rate in force {written / initial:g} times the learned one"
        )
    return (
        f"the training loop writes param_groups[i]['lr'] itself, which apo reads as a multiple of the initial rate "
        f"{initial:g}, as it reads a scheduler's: the rate in force is the learned rate times lr / {initial:g}, so "
        "build the optimizer with the schedule's peak"
    )
