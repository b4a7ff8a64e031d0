"""The rate at which the look-ahead turns from better to worse, followed over noisy look-aheads."""

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
#: A look-ahead at such a part of the rate, or less, raises it only if it sees where it turns.
_SHORT = 0.5
#: The largest rise and fall of the log of the rate in one meta-step. A rate that climbs slowly finds what large steps
#: would run into; one that is far too high has to fall at once.
_RISE, _FALL = 0.1, 1.0


class TurningPoint:
    r"""Follows the turning point from look-ahead to look-ahead, by a quadratic model of each.

    Along a look-ahead of rate :math:`\bar\eta` the meta-objective is about

    .. math::
        -a\, \frac{\eta}{\bar\eta} + \frac{c}{2} \Big(\frac{\eta}{\bar\eta}\Big)^2, \qquad
        a = (1 - \alpha) a_B + \alpha a_{B'}, \quad c = (1 - \alpha) c_B + \alpha c_{B'} + c_{FSD} + c_{WSD},

    with the promise a and the price c. It turns at :math:`\eta^* = \bar\eta a / c`. Single look-aheads are noisy, so
    promise and price per unit of the rate are averaged first.

    A step towards :math:`\sigma \eta^*` needs no meta-rate, and forgets the large meta-gradients of the first steps
    soon; RMSprop remembers them for a hundred meta-steps, during which a rate hardly moves.

    Attributes:
        lag: The log of the target over the learned rate at the last look-ahead; 0 if it said nothing.

    Example:
        >>> turning_point = TurningPoint()
        >>> comparison = Comparison(1.0, 2.0, 1.0, 2.0, 0.0)
        >>> round(turning_point.change(comparison, 0.5, ahead=0.1, target=1.0, rate=0.1), 3)  # it turns at 0.05
        -0.208
    """

    def __init__(self) -> None:
        self._promise = 0.0  # this average and the next lack their bias correction, which the quotient does not need
        self._price = 0.0
        self.lag = 0.0

    @property
    def has_looked(self) -> bool:
        """Whether any look-ahead has said something."""
        return self._promise != 0.0 or self._price != 0.0

    def change(
        self,
        comparison: Comparison,
        share: float,
        ahead: float,
        target: float,
        rate: float,
        resolution: float = 0.0,
        pace: float = 1.0,
        part: float = 1.0,
    ) -> float | None:
        """Return how the log of the rate should change, or None if this look-ahead says nothing.

        Args:
            comparison: What the batches say about the look-ahead.
            share: alpha, the share of the loss term on B'.
            resolution: Changes of the loss below this are lost in rounding. Slopes are not: they say up or down.
            ahead: The rate of the look-ahead.
            target: By what factor the rate shall exceed the turning point.
            rate: The learned rate.
            pace: How many times faster than usual the rate may rise.
            part: The part of the learned rate at which the look-ahead was made, because a schedule leaves no more in
                force. The rate falls only if even that part exceeds the target, and rises only if all of it is below.
        """
        self.lag, rise = 0.0, pace * _RISE
        is_short = part <= _SHORT  # and says little about the whole rate
        own, other = 1.0 - share, share
        promise = own * comparison.own_promise + other * comparison.other_promise
        price = own * comparison.own_price + other * comparison.other_price + comparison.proximal_price
        if not (math.isfinite(promise) and math.isfinite(price) and comparison.own_promise > 0):
            return None
        if max(abs(promise), abs(price)) < resolution:
            return -_FALL if price >= promise else 0.0 if is_short else rise
        if is_short and abs(price) < resolution:  # averages of rounding errors would raise the rate
            return 0.0
        self._promise = _MEMORY * self._promise + (1.0 - _MEMORY) * promise / ahead
        self._price = _MEMORY * self._price + (1.0 - _MEMORY) * price / ahead**2
        if self._price <= 0:
            return 0.0 if is_short else rise
        if self._promise <= 0:
            return -_FALL
        self.lag = math.log(target * self._promise / self._price / rate)
        if self.lag > 0:
            return min(min(pace * _GAIN, 1.0) * self.lag, rise)
        return max(_GAIN * min(self.lag - math.log(part), 0.0), -_FALL)

    def state_dict(self) -> dict[str, float]:
        """Return plain numbers."""
        return {"promise": self._promise, "price": self._price}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self._promise, self._price = float(state["promise"]), float(state["price"])
