r"""The rate at which the look-ahead turns from better to worse, from a quadratic model of each look-ahead.

Along a look-ahead of rate :math:`\bar\eta` the meta-objective is about

.. math::
    -a\, \frac{\eta}{\bar\eta} + \frac{c}{2} \Big(\frac{\eta}{\bar\eta}\Big)^2, \qquad
    a = (1 - \alpha) a_B + \alpha a_{B'}, \quad c = (1 - \alpha) c_B + \alpha c_{B'} + c_{FSD} + c_{WSD},

with the promise a and the price c (:class:`apo.rules.base.Comparison`). It turns at :math:`\eta^* = \bar\eta a / c`.
Single look-aheads are noisy, so promise and price per unit of the rate are averaged first.

A step towards :math:`\sigma \eta^*` needs no meta-rate, and forgets the large meta-gradients of the first steps soon;
RMSprop remembers them for a hundred meta-steps, during which a rate hardly moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from apo.rules.base import Comparison

__all__ = ["TurningPoint"]

#: Weight of the past in the averages.
_MEMORY = 0.9
#: The part of the way to the turning point that one meta-step goes.
_GAIN = 0.3
#: The largest rise and fall of the log of the rate in one meta-step. A rate that climbs slowly finds what large steps
#: would run into; one that is far too high has to fall at once.
_RISE, _FALL = 0.1, 1.0


class TurningPoint:
    """Follows the turning point from look-ahead to look-ahead.

    Example:
        >>> turning_point = TurningPoint()
        >>> comparison = Comparison(1.0, 2.0, 1.0, 2.0, 0.0)
        >>> round(turning_point.change(comparison, 0.5, ahead=0.1, target=1.0, rate=0.1), 3)  # it turns at 0.05
        -0.208
    """

    def __init__(self) -> None:
        self._promise = 0.0  # this average and the next lack their bias correction, which the quotient does not need
        self._price = 0.0

    def change(
        self,
        comparison: Comparison,
        share: float,
        ahead: float,
        target: float,
        rate: float,
        resolution: float = 0.0,
    ) -> float | None:
        """Return how the log of the rate should change, or None if this look-ahead says nothing.

        Args:
            comparison: What the batches say about the look-ahead.
            share: alpha, the share of the loss term on B'.
            resolution: Changes of the loss below this are lost in rounding. Slopes are not: they say up or down.
            ahead: The rate of the look-ahead.
            target: By what factor the rate shall exceed the turning point.
            rate: The rate in force.
        """
        own, other = 1.0 - share, share
        promise = own * comparison.own_promise + other * comparison.other_promise
        price = own * comparison.own_price + other * comparison.other_price + comparison.proximal_price
        if not (math.isfinite(promise) and math.isfinite(price) and comparison.own_promise > 0):
            return None
        if max(abs(promise), abs(price)) < resolution:
            return _RISE if price < promise else -_FALL
        self._promise = _MEMORY * self._promise + (1.0 - _MEMORY) * promise / ahead
        self._price = _MEMORY * self._price + (1.0 - _MEMORY) * price / ahead**2
        if self._price <= 0:
            return _RISE
        if self._promise <= 0:
            return -_FALL
        return min(max(_GAIN * math.log(target * self._promise / self._price / rate), -_FALL), _RISE)

    def state_dict(self) -> dict[str, float]:
        """Return plain numbers."""
        return {"promise": self._promise, "price": self._price}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self._promise, self._price = float(state["promise"]), float(state["price"])
