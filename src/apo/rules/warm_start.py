r"""Find the scale of a learning rate before any weight has moved.

The look-ahead objective falls while the rate is too small and rises once it is too large. The change of sign of
:math:`dQ / d\log\eta` on the first batch is where the look-ahead is best; training starts at a tenth of it, because
the first batch says little about the next hundred.

The search runs on a fixed grid of the rate (eight points a decade), so that it finds the same point from wherever it
starts: a training run from an initial rate of 1e-8 and one from 1e3 are then the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["find_turning_point"]

_POINTS_PER_DECADE = 8


def find_turning_point(slope: Callable[[float], float], start: float, bounds: tuple[float, float]) -> float | None:
    r"""Find the rate at which the slope turns from negative to positive.

    Args:
        slope: :math:`dQ / d\log\eta` as a function of :math:`\eta`; a value that is not finite counts as positive.
        start: Where to begin.
        bounds: Between which rates to search.

    Returns:
        The rate, or None if the slope does not change its sign within the bounds (a zero gradient, for instance).

    Example:
        >>> round(find_turning_point(lambda rate: rate - 0.09, 1e-6, (1e-10, 1e4)), 3)
        0.075
    """
    lowest, highest = (round(math.log10(bound) * _POINTS_PER_DECADE) for bound in bounds)

    def too_large(point: int) -> bool:
        value = slope(_rate(point))
        return not math.isfinite(value) or value >= 0

    point = min(max(round(math.log10(start) * _POINTS_PER_DECADE), lowest), highest)
    stride, upward = _POINTS_PER_DECADE, not too_large(point)
    small = large = point
    while True:  # widen until the turning point lies between `small` and `large`
        if upward:
            small, large = large, min(large + stride, highest)
        else:
            small, large = max(small - stride, lowest), small
        if small == large:
            return None
        if too_large(large if upward else small) == upward:
            break
        stride *= 2
    while large - small > 1:
        middle = (small + large) // 2
        small, large = (small, middle) if too_large(middle) else (middle, large)
    return _rate(small)


def _rate(point: int) -> float:
    return 10.0 ** (point / _POINTS_PER_DECADE)
