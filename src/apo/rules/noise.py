r"""How much over-relaxation the noise of the gradients allows.

Steps along noise do not add up to progress. They hold the loss above where a smaller rate would let it fall: SGD with
momentum on a quadratic stays higher by about

.. math::
    \frac{\eta}{4 (1 - \mu)} \operatorname{tr} \operatorname{Cov} g = \frac{\sigma}{4} (1 - \nu)\, a_B,

because a look-ahead at the rate :math:`\eta / \sigma` promises :math:`a_B`, of which the part :math:`\nu` is signal
(:mod:`apo.rules.over_relaxation`). Only curvature that all batches share turns noise of the past into loss, so the
price of noise is taken as

.. math::
    \varepsilon = \frac{\sigma}{4}\, \kappa\, (1 - \nu)\, a_B .

While training gains much, that price is worth paying: the end of training lowers the rate anyway. It is not where the
loss has stopped falling *because* of the noise. So the price is compared with the gain :math:`\Lambda`, by which the
loss falls while the number of steps doubles, and :math:`\sigma` is limited such that

.. math::
    \varepsilon \le \frac{3}{4}\, \Lambda, \qquad \Lambda = -\ln 2\, \frac{d J}{d \ln t} .

Small tasks showed nothing else that tells them apart: a regression on noisy targets, whose best rate is low, had a
price of three times its gain; an autoencoder, image classifiers, a language model and a regression without noise,
whose best rates are high, had 0.15 to 0.5 times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["NoiseLimit"]

#: The price of noise that is worth paying, in gains.
_WORTH = 0.75
#: A smaller sigma is not asked for.
_LEAST = 1.4
#: Before that many steps the loss says little about where it is going.
_FIRST_STEP = 100
#: Weight of the present in two averages of the loss, relative to the age of training. In an average of weight w the
#: log of time lies 1/w back, so the difference of the two is the slope times the difference of their 1/w.
_SLOW, _FAST = 1.5, 5.0
#: Weight of the past in the average of the promise.
_MEMORY = 0.95


class NoiseLimit:
    """The largest over-relaxation that noise allows.

    Example:
        >>> falling, resting = NoiseLimit(), NoiseLimit()
        >>> for step in range(0, 1000, 10):
        ...     falling.observe(step, loss=1.0 - 0.1 * math.log(1 + step), promise=0.01)
        ...     resting.observe(step, loss=1.0, promise=0.01)
        >>> falling.largest(curvature=1.0, signal=0.9) > 8, resting.largest(curvature=1.0, signal=0.9)
        (True, 1.4)
    """

    def __init__(self) -> None:
        self._last_step = 0
        self._slow = math.nan
        self._fast = math.nan
        self._promise = 0.0  # without bias correction
        self._weight = 0.0

    def observe(self, step: int, loss: float, promise: float) -> None:
        """Take in the loss before a step and what its batch promises."""
        if math.isnan(self._slow):
            self._slow = self._fast = loss
        part = (step - self._last_step) / (step + 1)
        self._slow += min(_SLOW * part, 1.0) * (loss - self._slow)
        self._fast += min(_FAST * part, 1.0) * (loss - self._fast)
        self._last_step = step
        self._promise = _MEMORY * self._promise + (1.0 - _MEMORY) * promise
        self._weight = _MEMORY * self._weight + 1.0 - _MEMORY

    def largest(self, curvature: float, signal: float) -> float:
        r"""Return the largest :math:`\sigma`.

        Args:
            curvature: kappa, the part of the curvature that is shared.
            signal: nu, the part of the gradient that is signal.
        """
        price = 0.25 * curvature * (1.0 - signal) * self._promise / self._weight
        if self._last_step < _FIRST_STEP or not price > 0:
            return math.inf
        gain = math.log(2.0) * (self._slow - self._fast) / (1.0 / _SLOW - 1.0 / _FAST)
        return max(_WORTH * gain / price, _LEAST)

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        vars(self).update(state)
