r"""Notice a network that does not learn, before a rising rate does more harm.

A learned rate rests on the loss: a step is good if the loss after it is lower. Three things break that, and each looks
healthy from one look-ahead to the next:

* a network that is dead (all ReLUs off) or at chance, where the objective is flat and the rate may be anything;
* noise that is taken for progress, as with BatchNorm and small batches: the rate climbs and the loss with it;
* a loss that says nothing about progress, as that of a policy gradient or of a GAN's generator.

All three show in the same way. The rate stands far above where it was when the loss last fell: then it goes back there
and may not climb that far again until the loss falls. Or the loss has come back to its first value, or never left it:
then the rate falls to a tenth. Either way the user is told.
"""

from __future__ import annotations

import math

__all__ = ["CLIMBED", "EXPLODED", "Progress"]

#: What the user is told.
CLIMBED = (
    "the learned rate had climbed while the loss did not fall, so it went back to where it last fell: the network may "
    "be dead, its batches too small, or its loss (of a policy gradient, of a GAN) may say nothing about progress; in "
    "the last case train at a fixed rate, without apo"
)
EXPLODED = (
    "the loss has risen to several times its first value: steps that were too long may have damaged the network, so "
    "start again with a smaller lr, or with the warm start if it is off"
)

#: Weight of the past in the averages of the loss and of its noise.
_MEMORY = 0.9
#: How many observations without progress are too many, over how many steps: with noise, a few say nothing.
_PATIENCE = 15
_PATIENT_STEPS = 150
#: How many times its first value a loss has to reach to count as exploded, which noise does not do.
_EXPLOSION = 4.0
#: How far above its level of the last progress the rate may climb without any more.
_CLIMB = math.log(4.0)
#: How far the rate falls when the loss is back at its first value.
_FALL = math.log(10.0)


class Progress:
    """Follows the loss and the log of the rate from meta-step to meta-step.

    Progress is a new minimum of the averaged loss, by more than a hundredth and more than a tenth of the noise.

    Example:
        >>> progress = Progress()
        >>> verdicts = [progress.observe(10 * n, 2.3, 0.1 * n) for n in range(40)]  # the rate climbs, the loss stays
        >>> next(n for n, (_, had_to_fall) in enumerate(verdicts) if had_to_fall)
        15
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0  # this average and the next lack their bias correction
        self._variance = 0.0
        self._first = math.inf
        self._highest = -math.inf
        self._best = math.inf
        self._since = 0  # observations since the last progress
        self._last_step = 0  # when that was
        self._level = math.inf  # log of the rate at the last progress
        self._ceiling = math.inf  # of the log of the rate, until there is progress
        self._has_begun = False

    def hold_below(self, log_rate: float) -> None:
        """Keep the rate below this level until there is progress: the first batch says little about a plateau's end."""
        self._ceiling = log_rate

    def observe(self, step: int, loss: float, log_rate: float) -> tuple[float, bool]:
        """Take in the loss at a meta-step and the log of the rate after it.

        Returns:
            The log of the rate that is allowed, and whether it had to be lowered for lack of progress.
        """
        last = self._mean / (1.0 - _MEMORY**self._count) if self._count else loss
        self._count += 1
        correction = 1.0 - _MEMORY**self._count
        self._mean = _MEMORY * self._mean + (1.0 - _MEMORY) * loss
        self._variance = _MEMORY * self._variance + (1.0 - _MEMORY) * (loss - last) ** 2
        mean, noise = self._mean / correction, math.sqrt(self._variance / correction)
        self._since += 1
        self._highest = max(self._highest, loss)
        if self._count == 1:  # before any step: what a network that learns will fall below
            self._first, self._best, self._level = loss, loss, log_rate
        if mean < self._best - max(0.01 * abs(self._best), 0.1 * noise):
            self._best, self._since, self._level, self._ceiling = mean, 0, log_rate, math.inf
            self._has_begun, self._last_step = True, step
            return log_rate, False
        patience_is_over = self._since > _PATIENCE and step - self._last_step >= _PATIENT_STEPS
        if patience_is_over and min(log_rate, self._ceiling) > self._level + _CLIMB:
            self._ceiling = self._level
            return self._ceiling, True
        if patience_is_over and self._has_begun and mean >= self._first:
            self._since, self._last_step, self._ceiling = 0, step, log_rate - _FALL
            return self._ceiling, True
        return min(log_rate, self._ceiling), False

    @property
    def has_exploded(self) -> bool:
        """Whether a loss was far above the first one: steps were too long, and may have left their mark."""
        return self._highest > self._first + (_EXPLOSION - 1.0) * abs(self._first)

    def state_dict(self) -> dict[str, float]:
        """Return plain numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        vars(self).update(state)
