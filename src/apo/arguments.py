"""Checks of arguments that several modules share."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["whole_number"]


def whole_number(name: str, value: Any, advice: str = "") -> int:
    """Return a count of at least one as an int; NumPy integers are accepted.

    Example:
        >>> whole_number("interval", 10)
        10
        >>> whole_number("interval", 0)
        Traceback (most recent call last):
            ...
        ValueError: interval must be a whole number of at least 1, got 0
    """
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}" + (advice and f": {advice}"))
    return number
