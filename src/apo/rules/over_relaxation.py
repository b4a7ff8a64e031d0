r"""How far beyond the look-ahead's best rate a learned rate goes: the over-relaxation :math:`\sigma`, chosen by itself.

A rate that minimises the look-ahead exactly sits below the edge of stability, and progressive sharpening drives it
lower and lower. So the learned rate is :math:`\sigma` times the one that the look-ahead prefers. How large that may
be depends on what the curvature along the look-ahead is made of:

* Curvature that all batches share acts like that of one quadratic. Heavy ball is stable there up to
  :math:`2 (1 + \mu) / \text{curvature}`, while the tail turns at :math:`(1 - \mu) / \text{curvature}`: it bears
  :math:`2/q` times the turning point, :math:`q = (1 - \mu)/(1 + \mu)`.
* Curvature that only the step's own batch has is new at every step. It bears twice the turning point, with momentum or
  without.

With :math:`\kappa`, the price on B' over that on B (:class:`apo.rules.base.Comparison`), as the shared part,

.. math:: \sigma = \frac{\sigma_0}{\kappa\, q + 1 - \kappa}\, \frac{\|w_0\|}{\|w\|}, \qquad \sigma_0 = 1.4,

at most 8, with :math:`\kappa` from running averages. Without momentum :math:`\sigma = 1.4`. The last factor is for
networks with BatchNorm and the like: weights before such a layer are scale-invariant, so noise makes them grow, the
turning point grows with their square, and a rate that followed it would never be too high for them, only for the rest
of the network.

The constants were chosen on 14 small tasks, see docs/how-to-choose.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apo.rules.base import Comparison

__all__ = ["OverRelaxation", "momentum_in"]

_BASE = 1.4
_LARGEST = 8.0
#: Weight of the past in the averages.
_MEMORY = 0.95
#: Prices are averaged relative to the promise, within this bound: a look-ahead that is all noise says little.
_BOUND = 20.0


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
        >>> for _ in range(100):
        ...     sigma.observe(Comparison(1.0, 0.5, 0.2, 0.25, 0.0))  # half of the curvature is shared
        >>> round(sigma.value, 2)
        2.66
    """

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        self._prices = [0.0, 0.0]  # on B and on B', relative to the promise; averages without bias correction
        self._first_norm = 0.0  # of the weights
        self.value = _BASE

    def observe(self, comparison: Comparison | None, weights: float | None = None, resolution: float = 0.0) -> None:
        """Take in what the batches say about a look-ahead, and the norm of weights that may be scale-invariant.

        A promise below the resolution of the loss says nothing.
        """
        self._first_norm = self._first_norm or weights or 0.0
        if comparison is None or not comparison.own_promise > resolution:
            return
        relative = [price / comparison.own_promise for price in (comparison.own_price, comparison.other_price)]
        if any(price != price for price in relative):  # NaN
            return
        bounded = [min(max(price, -_BOUND), _BOUND) for price in relative]
        self._prices = [_MEMORY * old + (1.0 - _MEMORY) * new for old, new in zip(self._prices, bounded, strict=True)]
        own, other = self._prices
        shared = min(max(other / own, 0.0), 1.0) if own > 0 else 1.0
        q = (1.0 - self._momentum) / (1.0 + self._momentum)
        growth = max(weights / self._first_norm, 1.0) if weights and self._first_norm else 1.0
        self.value = min(_BASE / (shared * q + 1.0 - shared), _LARGEST) / growth

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"prices": list(self._prices), "first_norm": self._first_norm, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self._prices, self._first_norm = list(state["prices"]), float(state["first_norm"])
        self.value = float(state["value"])
