"""Notice a loss that is multiplied by a small number where apo cannot see it: inside the criterion or the network.

The function-space term has a weight that fits a divergence on the scale of the loss. Beside 0.001 times a loss it is a
thousand times too heavy, and the learned rate stays so small that nothing is learned. A factor before the criterion is
seen, see :func:`apo.core.objective.unit_of_loss`; one inside is not. But each look-ahead tells two prices, that of
the term and that of the loss's own curvature. The first is about a third of the second if the divergence belongs to the
loss, and up to ten times it if another one was chosen. Where the loss is linear in the outputs, as far from its
minimum, it has no curvature, so the first look-aheads do not count, nor do those that promise good progress.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from apo.core.objective import ProximalObjective
from apo.rules.base import Outcome

__all__ = ["LossScale"]

#: How many look-aheads do not count, and how many of the last ones are judged together.
_FIRST, _WINDOW = 30, 30
#: The price of the term, as a multiple of that of the curvature: more than this is too much, and this is usual.
_MOST, _USUAL = 10.0, 0.3
#: The part of the loss by which a look-ahead promises to lower it: less than this is little.
_SLOW = 1e-3

_SENTENCE = (
    "the function-space term costs {:.0f} times as much as the curvature of the loss, which holds the rate down: "
    "the loss seems to be multiplied by about {:.0e}, or less, inside the criterion or the network; take the factor "
    "out, or pass discrepancy=apo.Bregman(loss) if the criterion is convex in the outputs, or fsd_weight={:.0e}"
)


class LossScale:
    """Follows both prices from look-ahead to look-ahead, and says once that the loss seems to be scaled.

    Args:
        objective: The meta-objective. One whose discrepancy belongs to the loss has the right scale.

    Example:
        >>> from apo import CategoricalKL
        >>> from apo.rules.base import Comparison
        >>> scale = LossScale(ProximalObjective(0.3, 0.0, CategoricalKL()))
        >>> outcome = Outcome(0, 1e-3, 1e-3, comparison=Comparison(1e-7, 1e-10, 1e-7, 1e-10, 3e-8))
        >>> [step for step in range(100) if scale.sentences(outcome)]
        [59]
    """

    def __init__(self, objective: ProximalObjective) -> None:
        self._objective = objective
        self._seen = 0
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._promises: deque[float] = deque(maxlen=_WINDOW)
        self._has_spoken = False

    def sentences(self, outcome: Outcome) -> list[str]:
        """Take in a look-ahead, and return what the user should know."""
        comparison, loss = outcome.comparison, abs(outcome.loss)
        if self._has_spoken or self._objective.has_scale_of_loss or comparison is None or not 0.0 < loss < math.inf:
            return []
        self._seen += 1
        if self._seen > _FIRST:
            # A price below the resolution is noise.
            own = max(comparison.own_price, outcome.resolution, math.ulp(0.0))
            self._ratios.append(comparison.proximal_price / own)
            self._promises.append(comparison.own_promise / loss)
        if len(self._ratios) < _WINDOW:
            return []
        ratio = median(self._ratios)
        if not (ratio > _MOST and median(self._promises) < _SLOW):
            return []
        self._has_spoken = True
        factor = _USUAL / ratio
        return [_SENTENCE.format(ratio, factor, factor * self._objective.fsd_weight)]
