r"""How far beyond the look-ahead's best rate a learned rate goes: the over-relaxation :math:`\sigma`, chosen by itself.

A rate that minimises the look-ahead exactly sits below the edge of stability, and progressive sharpening drives it
lower and lower. So the learned rate is :math:`\sigma` times the one that the look-ahead prefers. How large that may
be depends on what the curvature along the look-ahead is made of:

* Curvature that all batches share acts like that of one quadratic. Heavy ball is stable there up to
  :math:`2 (1 + \mu) / \text{curvature}`, while the tail turns at :math:`(1 - \mu) / \text{curvature}`: it bears
  :math:`2/q` times the turning point, :math:`q = (1 - \mu)/(1 + \mu)`.
* Curvature that only the step's own batch has is new at every step. It bears twice the turning point, with momentum or
  without.

What is shared is measured twice (:class:`apo.rules.base.Comparison`): :math:`\kappa`, the price on B' over that on B,
is the shared part of the curvature; :math:`\nu`, the promise on B' over that on B, is the signal in the gradient.
Where gradients are mostly noise, steps do not add up as those on one quadratic do, even if the curvature is shared: a
regression on noisy targets and an autoencoder share 0.8 and 0.9 of it, and their best rates were 0.7 and 4.9 times the
turning point. Half of a gradient as signal counts as all, and both parts count alike:

.. math::
    \sigma = \frac{\sigma_0}{s\, q + 1 - s}\, \frac{\|w_0\|}{\|w\|}, \qquad
    s = \sqrt{\kappa \min(2 \nu, 1)}, \quad \sigma_0 = 2,

at most 8 and at most what noise allows (:mod:`apo.rules.noise`), from running averages. Without momentum
:math:`\sigma = 1.4`. The last factor is for networks with BatchNorm and the like: weights before such a layer are
scale-invariant, so noise makes them grow, the turning point grows with their square, and a rate that followed it would
never be too high for them, only for the rest of the network. Such networks bear more where gradients agree:
:math:`\sigma_0 = \min(2 + 8 \nu, 4)`. With batches of 128 and :math:`\nu` of 0.2 that was worth 2 to 10%; with
batches of 16 and :math:`\nu` below 0.1 a constant 2.8 cost 5%. Over 78,000 steps of ResNet-32 it is too much and 1.4
was right, so after 10,000 steps :math:`\sigma_0 - 1.4` falls in proportion to the inverse of their number.

The constants were chosen on small tasks, see docs/how-to-choose.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from apo.rules.base import Outcome
from apo.rules.noise import NoiseLimit

__all__ = ["OverRelaxation", "momentum_in"]

#: sigma_0, and sigma before anything is known.
_BASE, _FIRST = 2.0, 1.4
_LARGEST = 8.0
#: By how much sigma_0 grows with the signal in a network with BatchNorm, its largest value there, and the number of
#: steps after which it begins to approach sigma's first value.
_PER_SIGNAL, _NORMALISED, _LONG = 4.0, 4.0, 10_000
#: Weight of the past in the averages.
_MEMORY = 0.95
#: All is averaged relative to the promise on B, within this bound: a look-ahead that is all noise says little.
_BOUND = 20.0
#: The part of a gradient that has to be signal for all of it to count as such.
_ENOUGH = 0.5


def momentum_in(group: Mapping[str, Any]) -> float:
    """Return how much of the past a step of an optimizer with this param group contains, from 0 to 1.

    Example:
        >>> momentum_in({"momentum": 0.9}), momentum_in({"betas": (0.8, 0.99)}), momentum_in({"lr": 0.1})
        (0.9, 0.8, 0.0)
    """
    betas = group.get("betas")
    momentum = group.get("momentum", betas[0] if isinstance(betas, (tuple, list)) and betas else 0.0)
    return float(momentum) if isinstance(momentum, (int, float)) else 0.0


class OverRelaxation:
    r""":math:`\sigma` from what the batches have in common.

    Args:
        momentum: :math:`\mu` of the optimizer.

    Example:
        >>> sigma = OverRelaxation(0.9)
        >>> sigma.value
        1.4
        >>> from apo.rules.base import Comparison, Outcome
        >>> half_is_shared_a_quarter_is_signal = Comparison(1.0, 0.5, 0.25, 0.25, 0.0)
        >>> for step in range(100):
        ...     sigma.observe(Outcome(step, 2.0, 1.9, comparison=half_is_shared_a_quarter_is_signal))
        >>> round(sigma.value, 2)
        3.8
    """

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        # Prices on B and on B' and promise on B', relative to the promise on B; averages, and the last is their weight.
        self._averages = [0.0, 0.0, 0.0, 0.0]
        self._first_norm = 0.0  # of the weights
        self._noise = NoiseLimit()
        self.value = _FIRST

    def observe(self, outcome: Outcome) -> None:
        """Take in what the batches say about a look-ahead; a promise below the resolution of the loss says nothing."""
        comparison, weights = outcome.comparison, outcome.weights
        self._first_norm = self._first_norm or weights or 0.0
        if comparison is None or not comparison.own_promise > outcome.resolution:
            return
        seen = (comparison.own_price, comparison.other_price, comparison.other_promise, comparison.own_promise)
        relative = [value / comparison.own_promise for value in seen]
        if any(value != value for value in relative):  # NaN
            return
        bounded = [min(max(value, -_BOUND), _BOUND) for value in relative]
        self._averages = [
            _MEMORY * old + (1.0 - _MEMORY) * new for old, new in zip(self._averages, bounded, strict=True)
        ]
        self._noise.observe(outcome.step, outcome.loss, comparison.own_promise)
        own, other, promise, weight = self._averages
        curvature = min(max(other / own, 0.0), 1.0) if own > 0 else 1.0
        signal = min(max(promise / weight, 0.0), 1.0)
        shared = math.sqrt(curvature * min(signal / _ENOUGH, 1.0))
        q = (1.0 - self._momentum) / (1.0 + self._momentum)
        growth = max(weights / self._first_norm, 1.0) if weights and self._first_norm else 1.0
        base = _BASE
        if weights:
            base = min(_BASE * (1.0 + _PER_SIGNAL * signal), _NORMALISED)
            base = _FIRST + (base - _FIRST) * min(_LONG / (outcome.step + 1), 1.0)
        borne = min(base / (shared * q + 1.0 - shared), _LARGEST)
        self.value = min(borne, self._noise.largest(curvature, signal)) / growth

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "averages": list(self._averages),
            "first_norm": self._first_norm,
            "value": self.value,
            "noise": self._noise.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self._averages, self._first_norm = list(state["averages"]), float(state["first_norm"])
        self.value = float(state["value"])
        self._noise.load_state_dict(state["noise"])
