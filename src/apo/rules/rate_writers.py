"""Who reads and writes a learning rate: a scheduler of torch, or the training loop itself.

A number does not say where it comes from, and one that did would end up in files. So the place is asked: whether a
scheduler's method is among the callers and, in the training loop, whether the line that writes a rate has read it.
"""

from __future__ import annotations

import sys
from types import CodeType

from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Place", "place_of_access", "read_by_get_lr", "writing_scheduler"]

#: How many calls lie at most between a scheduler's method and the access: torch's helpers and a comprehension.
_DEPTH = 5

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
