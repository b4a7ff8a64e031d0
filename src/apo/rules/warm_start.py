r"""Find the scale of a learning rate before any weight has moved.

The look-ahead objective falls while the rate is too small and rises once it is too large. The *first* change of sign of
:math:`dQ / d\log\eta` on the first batch, from the bottom up, is where the look-ahead is best; training starts at a
tenth of it, because the first batch says little about the next hundred, or at a hundredth if meta-steps come at every
step at first: then the rate climbs by itself, and no network is damaged before the rule has seen how it takes steps.
Farther up Q may fall again: a step that is far too long can leave a dead network, a saturated softmax or a normalised
output, where the objective is flat and its slope means nothing. So the search walks up from a step that is tiny next to
the weights, in short strides.

The search runs on a fixed grid of the rate (eight points a decade) from a bottom that does not depend on the user's
rate: a training run from an initial rate of 1e-8 and one from 1e3 are then the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer, RMSprop

from apo.errors import MissingBatchError, ReplayError
from apo.vectors import norm

__all__ = ["NOTHING_TURNS", "excess_of_first_step", "first_turning_point", "rate_of_a_tiny_step"]

#: What the user is told if there is no turning point.
NOTHING_TURNS = (
    "the warm start found no rate at which the look-ahead turns from better to worse, so training starts at {:.2g}, "
    "which moves the weights by a thousandth: check that the loss says something about progress, and pass "
    "warm_start=False and your own lr if you know a good one"
)

_POINTS_PER_DECADE = 8
#: Half a decade: short enough not to leap over a turning point and the next one.
_STRIDE = 4
#: A step of this length relative to the weights is too short for any network.
_TINY = 1e-4
#: The length of weights that are zero, per element: initialisations are far longer.
_SMALLEST_WEIGHT = 1e-3


def rate_of_a_tiny_step(displacement: Sequence[Tensor], weights: Sequence[Tensor], rate: float) -> float | None:
    """Return the rate at which a look-ahead that is proportional to it is tiny next to the weights.

    Args:
        displacement: The look-ahead at ``rate``.
        weights: What it moves.
        rate: Any rate.

    Returns:
        The rate, or None if the displacement is zero or not finite.

    Example:
        >>> round(rate_of_a_tiny_step([torch.tensor([0.2])], [torch.tensor([3.0])], 0.1), 6)
        0.00015
    """
    length = norm(displacement).item()
    if not (math.isfinite(length) and length > 0):
        return None
    elements = sum(weight.numel() for weight in weights)
    return rate * _TINY * max(norm(weights).item(), _SMALLEST_WEIGHT * math.sqrt(elements)) / length


def first_turning_point(slope: Callable[[float], float], bottom: float, bounds: tuple[float, float]) -> float | None:
    r"""Find the smallest rate at which the slope turns from negative to positive.

    Args:
        slope: :math:`dQ / d\log\eta` as a function of :math:`\eta`. A value that is not finite counts as positive, and
            so does an error of the network or the loss: a loss may refuse what a step too long has made of its inputs.
        bottom: A rate that is too small.
        bounds: Between which rates to search.

    Returns:
        The rate, or None if the slope does not turn within the bounds (a zero gradient, for instance).

    Example:
        >>> round(first_turning_point(lambda rate: rate - 0.09, 1e-6, (1e-10, 1e4)), 3)
        0.075
    """
    lowest, highest = (round(math.log10(bound) * _POINTS_PER_DECADE) for bound in bounds)

    def too_large(point: int) -> bool:
        try:
            value = slope(10.0 ** (point / _POINTS_PER_DECADE))
        except (ReplayError, MissingBatchError, torch.cuda.OutOfMemoryError):
            raise  # not the fault of the rate
        except (ArithmeticError, AssertionError, IndexError, RuntimeError, ValueError):
            return True
        return not math.isfinite(value) or value >= 0

    small = min(max(round(math.log10(bottom) * _POINTS_PER_DECADE), lowest), highest)
    while too_large(small):
        if small == lowest:
            return None
        small = max(small - _POINTS_PER_DECADE, lowest)
    large = small
    while not too_large(large):
        if large == highest:
            return None
        small, large = large, min(large + _STRIDE, highest)
    while large - small > 1:
        middle = (small + large) // 2
        small, large = (small, middle) if too_large(middle) else (middle, large)
    return 10.0 ** (small / _POINTS_PER_DECADE)


def excess_of_first_step(optimizer: Optimizer) -> float:
    r"""Return how many times longer the first step of an optimizer is than later ones at the same rate.

    RMSprop starts its average of squared gradients at zero and does not correct that, so it divides the first gradient
    g by :math:`\sqrt{1 - \alpha}\, |g|`. Adam corrects it.

    Example:
        >>> round(excess_of_first_step(RMSprop([torch.zeros(2)], alpha=0.99)), 6)
        10.0
        >>> excess_of_first_step(torch.optim.Adam([torch.zeros(2)]))
        1.0
    """
    return 1.0 / math.sqrt(1.0 - optimizer.param_groups[0]["alpha"]) if isinstance(optimizer, RMSprop) else 1.0
