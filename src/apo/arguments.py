"""Checks of arguments that several modules share."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

__all__ = ["positive_number", "positive_range", "whole_number"]


def positive_number(name: str, value: Any, advice: str = "", alternative: str = "") -> float:
    """Return a number above zero as a float.

    Example:
        >>> positive_number("max_change", -1, alternative="or None")
        Traceback (most recent call last):
            ...
        ValueError: max_change must be positive or None, got -1
    """
    end = f" {alternative}" * bool(alternative) + f", got {value!r}" + f": {advice}" * bool(advice)
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number{end}")
    if not float(value) > 0:
        raise ValueError(f"{name} must be positive{end}")
    return float(value)


def positive_range(name: str, value: Any, advice: str) -> None:
    """Raise unless the value is a pair of finite numbers above zero, the lower one first.

    Example:
        >>> positive_range("bounds", (1.0, 0.5), "pass (1e-10, 1e4), for instance")
        Traceback (most recent call last):
            ...
        ValueError: bounds must be 0 < lowest < highest, got (1.0, 0.5)
    """
    if not (isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(bound, Real) for bound in value)):
        raise TypeError(f"{name} must be a pair of numbers, got {value!r}: {advice}")
    if not 0 < value[0] < value[1] < math.inf:
        raise ValueError(f"{name} must be 0 < lowest < highest, got {value}")


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
