r"""How far a learned rate goes beyond the turning point: the over-relaxation :math:`\sigma`, chosen by itself.

A learned rate goes to :math:`\sigma` times the rate at which the look-ahead turns from better to worse, which
:mod:`apo.rules.turning_point` follows.

A rate that minimises the look-ahead exactly sits below the edge of stability, and progressive sharpening drives it
lower and lower. So the learned rate goes beyond it. How far it may go depends on what the curvature along the
look-ahead is made of:

* Curvature that all batches share acts like that of one quadratic. Heavy ball is stable there up to
  :math:`2 (1 + \mu) / \text{curvature}`, while the tail turns at :math:`(1 - \mu) / \text{curvature}`: it bears
  :math:`2/q` times the turning point, :math:`q = (1 - \mu)/(1 + \mu)`.
* Curvature that only the step's own batch has is new at every step. It bears twice the turning point, with momentum or
  without.

What is shared is measured twice (:class:`apo.rules.base.Comparison`): :math:`\kappa`, the price on B' over that on B,
is the shared part of the curvature; :math:`\nu`, the promise on B' over that on B, is the signal in the gradient. Where
gradients are mostly noise, steps do not add up as those on one quadratic do, even if the curvature is shared: a
regression on noisy targets and an autoencoder share 0.8 and 0.9 of it, and their best rates were 0.7 and 4.9 times the
turning point. Half of a gradient as signal counts as all, and both parts count alike:

.. math::
    \sigma = \frac{\sigma_0}{s\, q + 1 - s}\, \sqrt{\frac{\|w_0\|}{\|w\|}}, \qquad
    s = \sqrt{\kappa \min(2 \nu, 1)}, \quad \sigma_0 = 2,

from running averages; at most 16, or 8 for optimizers that divide by an average of squared gradients, and at most the
:math:`\sigma_\varepsilon` that noise allows (:class:`NoiseLimit`). (SGD with momentum 0.9 on 20 small tasks of 400 and
500 steps, 25 runs, against the best of seven cosines: with a limit of 8 a translation ends 13.8% short and the mean is
2.1% ahead, with 16 it ends 4.1% ahead and the mean is 3.4% ahead; 32 differs little but there. AdamW gains nothing by
it.) Without momentum q is 1, so that :math:`\sigma` is :math:`\sigma_0`: 1.65, because SGD is unstable beyond 2; or 2.8
if the optimizer divides by a running average of squared gradients, because that average grows when steps oscillate, and
shortens them. (RMSprop on 14 small tasks of 400 to 1,000 steps, one seed, against the best of seven cosines: 1.4 ends
3.2% short on average and 11.8% at worst, 1.9 ends 1.0 and 4.2% short, 2.8 ends 0.8% ahead and 2.9% short, 3.5 ends 0.2%
ahead and 5.3% short.)

Both bounds estimate the same number. So in networks without BatchNorm, SGD with momentum and the like go a part of the
way to :math:`\sigma_\varepsilon` where that is larger:

.. math::
    \sigma \leftarrow \sigma^{1 - p}\, \sigma_\varepsilon^p, \qquad p = \min(4 \nu, 1) / 3,

but not beyond 8, because some small loops without a known end were not stable at 16. A small convolutional network on
MNIST leaves its plateau at a twentieth of the rate that it bears later. Curvature then stays as sharp as the steps are
short, and it ended 3.4, 1.1 and 4.1% below the best cosine (three seeds), now 0.9, 0.2 and 0.0%. On 13 other tasks of
400 to 1,500 steps there is no such gain: they ended 3.8% above on average, and end 3.6% above; ten runs with other
seeds, 3.1 and 3.3%. Regression with noisy targets, 20 runs of 1,000 steps, pays for it: the mean distance to the
targets without noise is 0.016 instead of 0.014.

The last factor is for networks with BatchNorm and the like: weights before such a layer are scale-invariant, so noise
makes them grow, the turning point grows with them, and a rate that followed it would never be too high for them, only
for the rest of the network: the weights would grow exponentially. With the root they grow in proportion to time. The
quotient without the root held the rate of Adam where the first steps had left it, and thin ResNets lost 1 to 4% by that
over 1,000 to 16,000 steps. Such networks bear more where gradients agree: :math:`\sigma_0 = \min(2 + 8 \nu, 4)`. With
batches of 128 and :math:`\nu` of 0.2 that was worth 2 to 10%; with batches of 16 and :math:`\nu` below 0.1 a constant
2.8 cost 5%.

Over 70,000 steps of ResNet-32 with SGD, momentum and an L2 penalty that is too much: the rate stood at 0.25 for half of
training, where 0.1 is better, and the network ended 1.4% (CIFAR-10) and 3.2% (CIFAR-100) below a cosine from 0.1; a
constant 1.4 had ended above it. So what :math:`\sigma` has above 1.4 falls in proportion to the inverse of the number
of steps after the first 1,000.

The constants were chosen on small tasks, see docs/how-to-choose.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from apo.rules.base import Outcome

__all__ = ["NoiseLimit", "OverRelaxation", "momentum_in"]

#: sigma_0 with momentum, without, and without but with an average of squared gradients; sigma before anything is known.
_BASE, _PLAIN, _ADAPTIVE, _FIRST = 2.0, 1.65, 2.8, 1.4
#: The largest sigma, without and with an average of squared gradients.
_LARGEST, _LARGEST_ADAPTIVE = 16.0, 8.0
#: By how much sigma_0 grows with the signal in a network with BatchNorm, its largest value there, and the number of
#: steps after which it begins to approach sigma's first value.
_PER_SIGNAL, _NORMALISED, _LONG = 4.0, 4.0, 1_000
#: Weight of the past in the averages of what batches share and of noise.
_MEMORY = 0.95
#: All is averaged relative to the promise on B, within this bound: a look-ahead that is all noise says little.
_BOUND = 20.0
#: The exponent of what noise would allow beyond that, per signal in the gradient, and its largest value; and the
#: largest sigma that comes of it.
_PER_SIGNAL_OF_LIMIT, _MOST_OF_LIMIT, _LARGEST_BY_LIMIT = 4.0 / 3.0, 1.0 / 3.0, 8.0
#: The part of a gradient that has to be signal for all of it to count as such.
_ENOUGH = 0.5

#: How much of the noise counts, in terms of what is shared of the curvature, and at least.
_PER_CURVATURE, _AT_LEAST = 4.0 / 3.0, 0.5
#: The smallest limit that noise sets; and the smallest unless weights have become worse, because what looks like noise
#: may be a plateau, which a small rate does not leave, or other data.
_LEAST, _CAUTIOUS = 0.1, 0.7
#: Whether they have become worse takes a pass of the network: after so many steps it is asked at every fourth
#: look-ahead at most. Before, rates move fast, and a GAN's generator was lost in silence by an answer that was old.
_ASK_OFTEN, _ASK_AGAIN = 200, 4
#: Before that many steps, and look-aheads, the loss says little about where it is going.
_FIRST_STEP, _FIRST_LOOKS = 30, 10
#: Weight of the present in two averages of the loss, relative to the age of training. In an average of weight w the
#: log of time lies 1/w back, so the difference of the two is the slope times the difference of their 1/w.
_SLOW, _FAST = 1.5, 5.0


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
        adaptive: Whether it divides by an average of squared gradients.

    Example:
        >>> sigma = OverRelaxation(0.9)
        >>> sigma.value
        1.4
        >>> from apo.rules.base import Comparison
        >>> half_is_shared_a_quarter_is_signal = Comparison(0.1, 0.05, 0.025, 0.025, 0.0)
        >>> for step in range(100):
        ...     loss = 2.0 - 0.5 * math.log(1 + step)  # falls for long, so noise limits little
        ...     sigma.observe(Outcome(step, loss, loss, comparison=half_is_shared_a_quarter_is_signal))
        >>> round(sigma.value)  # 3.8 before noise has its say
        7
    """

    def __init__(self, momentum: float, adaptive: bool = False) -> None:
        self._momentum = momentum
        self._base = _BASE if momentum else _ADAPTIVE if adaptive else _PLAIN
        self._largest = _LARGEST_ADAPTIVE if adaptive else _LARGEST
        self._listens_to_noise = momentum > 0.0 and not adaptive
        # Prices on B and on B' and promise on B', relative to the promise on B; averages, and the last is their weight.
        self._averages = [0.0, 0.0, 0.0, 0.0]
        self._first_norm = 0.0  # of the weights
        self._noise = NoiseLimit()
        self.value = _FIRST

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]]) -> OverRelaxation:
        """Return that of an optimizer with these param groups."""
        momentum = max((momentum_in(group) for group in groups), default=0.0)
        return cls(momentum, adaptive=any("eps" in group for group in groups))  # eps keeps a quotient finite

    def observe(self, outcome: Outcome, has_begun: bool = True) -> None:
        """Take in what the batches say about a look-ahead; a promise below the resolution of the loss says nothing.

        Args:
            outcome: Of the look-ahead.
            has_begun: Whether training has made any progress.
        """
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
        own, other, promise, weight = self._averages
        curvature = min(max(other / own, 0.0), 1.0) if own > 0 else 1.0
        signal = min(max(promise / weight, 0.0), 1.0)
        setback = outcome.setback if has_begun else None
        is_worse = None if setback is None else lambda: setback() > 0.0
        limit = self._noise.observe(outcome.step, outcome.loss, comparison.own_promise, curvature, signal, is_worse)
        shared = math.sqrt(curvature * min(signal / _ENOUGH, 1.0))
        q = (1.0 - self._momentum) / (1.0 + self._momentum)
        growth = max(weights / self._first_norm, 1.0) if weights and self._first_norm else 1.0
        base = self._base
        if weights and self._momentum:
            base = min(_BASE * (1.0 + _PER_SIGNAL * signal), _NORMALISED)
        borne = base / (shared * q + 1.0 - shared)
        if self._listens_to_noise and not weights and borne < limit < math.inf:
            boosted = borne * (limit / borne) ** min(_PER_SIGNAL_OF_LIMIT * signal, _MOST_OF_LIMIT)
            borne = max(borne, min(boosted, _LARGEST_BY_LIMIT))
        borne = min(borne, self._largest)
        self.value = min(borne, limit) / math.sqrt(growth)
        if weights and self.value > _FIRST:
            self.value = _FIRST + (self.value - _FIRST) * min(_LONG / (outcome.step + 1), 1.0)

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


class NoiseLimit:
    r"""The largest over-relaxation that noise allows.

    Steps along noise do not add up to progress. They hold the loss above where a smaller rate would let it fall: SGD
    with momentum on a quadratic stays higher by about

    .. math::
        \frac{\eta}{4 (1 - \mu)} \operatorname{tr} \operatorname{Cov} g = \frac{\sigma}{4} (1 - \nu)\, a_B,

    because a look-ahead at the rate :math:`\eta / \sigma` promises :math:`a_B`, of which the part :math:`\nu` is
    signal. Only curvature that all batches share turns noise of the past into loss, so the price of noise should be
    :math:`\kappa` times that. But where batches share almost nothing (embeddings, batches of one or two) each step fits
    its own batch and undoes what others have learned, and losses rose from 0.69 to 2.4. So the price is taken as

    .. math::
        \varepsilon = \frac{\sigma}{4} \max\Big(\frac{4 \kappa}{3}, \frac12\Big) (1 - \nu)\, a_B .

    While training gains much, that price is worth paying: the end of training lowers the rate anyway. It is not where
    the loss has stopped falling *because* of the noise. So :math:`\sigma` is limited such that the price is at most the
    gain :math:`\Lambda`, by which the loss falls while the number of steps doubles:

    .. math::
        \varepsilon \le \Lambda, \qquad \Lambda = -\ln 2\, \frac{d J}{d \ln t} .

    On 18 small tasks, of classification with batches of 1 to 64, regression, language and recommendation, twice
    :math:`\Lambda` over the price without kappa was mostly within a factor of three of the sigma that the best of seven
    cosines amounts to.

    A limit below 0.7 also needs earlier weights that are better on the batch of now: a loss also stops falling on a
    plateau, and where other data come.

    Example:
        >>> falling, resting = NoiseLimit(), NoiseLimit()
        >>> for step in range(0, 1000, 10):
        ...     most = falling.observe(
        ...         step, loss=1.0 - 0.1 * math.log(1 + step), promise=0.01, curvature=1.0, signal=0.9
        ...     )
        ...     least = resting.observe(step, loss=1.0, promise=0.01, curvature=1.0, signal=0.0)
        >>> most > 8, round(least, 2)
        (True, 0.7)
    """

    def __init__(self) -> None:
        self._last_step = 0
        self._slow = math.nan
        self._fast = math.nan
        self._promise = 0.0  # without bias correction
        self._weight = 0.0
        self._limit = math.inf
        self._was_worse = False
        self._looks_since_asked = _ASK_AGAIN

    def observe(
        self,
        step: int,
        loss: float,
        promise: float,
        curvature: float,
        signal: float,
        is_worse: Callable[[], bool] | None = None,
    ) -> float:
        r"""Take in a look-ahead and return the largest :math:`\sigma`.

        Args:
            step: Its step.
            loss: The loss before the step.
            promise: What its own batch promises.
            curvature: kappa, the part of the curvature that is shared.
            signal: nu, the part of the gradient that is signal.
            is_worse: Returns whether the weights are worse than earlier ones on the same batch, for which it runs the
                network; None if nobody knows.
        """
        if math.isnan(self._slow):
            self._slow = self._fast = loss
        part = (step - self._last_step) / (step + 1)
        self._slow += min(_SLOW * part, 1.0) * (loss - self._slow)
        self._fast += min(_FAST * part, 1.0) * (loss - self._fast)
        self._last_step = step
        self._promise = _MEMORY * self._promise + (1.0 - _MEMORY) * promise
        self._weight = _MEMORY * self._weight + 1.0 - _MEMORY
        if step < _FIRST_STEP or self._weight < 1.0 - _MEMORY**_FIRST_LOOKS:
            return math.inf
        counts = max(_PER_CURVATURE * curvature, _AT_LEAST)
        price = 0.25 * counts * (1.0 - signal) * self._promise / self._weight
        gain = math.log(2.0) * (self._slow - self._fast) / (1.0 / _SLOW - 1.0 / _FAST)
        worth = gain / price if price > 0 else math.inf
        self._looks_since_asked += 1
        if worth < _CAUTIOUS:
            if is_worse is not None and (step < _ASK_OFTEN or self._looks_since_asked >= _ASK_AGAIN):
                self._was_worse, self._looks_since_asked = is_worse(), 0
            least = _LEAST if self._was_worse else _CAUTIOUS
            worth = max(worth, min(self._limit, _CAUTIOUS) if is_worse is None else least)
        self._limit = worth
        return worth

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        vars(self).update(state)
