r"""Notice a network that does not learn, before a rising rate does more harm, and bring back one that is lost.

A learned rate rests on the loss: a step is good if the loss after it is lower. Three things break that, and each looks
healthy from one look-ahead to the next:

* a network that is dead (all ReLUs off) or at chance, where the objective is flat and the rate may be anything;
* noise that is taken for progress, as with BatchNorm and small batches: the rate climbs and the loss with it;
* a loss that says nothing about progress, as that of a policy gradient or of a GAN's generator.

All three show in the same way. The rate stands far above where it was when the loss last fell: then it may not climb
further, and if the loss does not fall for long it goes back there. Or the loss is above its first value: then the rate
falls to a tenth.

A network is *lost* if most of its parameters have no gradient any more, if its loss stays *at* its first value, if it
leaps to several times that value, or if it is not finite: all ReLUs off, outputs at chance, or NaN. Lowering the rate
does not bring it back, so the weights go back, too, if earlier ones are kept (:mod:`apo.rules.return_point`). The user
is told in any case.

**The data may have changed instead.** A loss also rises when other labels, other tasks or larger targets come, and it
stays near its first value if most of it cannot be reduced, or if a constant is in it. So earlier weights are asked
first: on the batch of now, do they restore at least half of what was lost? If not, the loss of now is the new first
value. In the same way a network has begun to learn if it is better than its first weights *on the same batch*, even if
the batches have become harder.

**The start.** Until the loss has fallen for the first time the rate has a limit. Deep networks without normalisation
begin on a plateau: the outputs hardly depend on the inputs, so the loss hardly differs from batch to batch, the
curvature is tiny, and the turning point is a hundred times that of the network which leaves the plateau. There the rate
climbs to its limit by 6% a step, and beyond by 1%: the plateau then ends at about the lowest rate that ends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from apo.rules.base import Outcome, Standing

__all__ = ["Progress"]

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
LOST = (
    "the network was lost: its ReLUs died, its loss was no better than before the first step, or not finite. Its "
    "weights went back to where the loss last fell, the optimizer's state was emptied, and training continues at a "
    "smaller rate"
)
LOST_FOR_GOOD = (
    "the network is lost, or its data have changed: its loss is no better than before the first step. No earlier "
    "weights are kept so late in training, or for an optimizer that had a state before its first step, so only the "
    "rate was lowered: go back to a checkpoint"
)

WAITING = (
    "the loss has not fallen yet, and hardly differs from batch to batch: the network is on a plateau, or dead, or its "
    "output does not depend on its input; the rate climbs slowly until that ends, and normalisation layers or another "
    "initialisation would end it sooner"
)

#: Weight of the past in the averages of the loss and of its noise.
_MEMORY = 0.9
#: How many observations without progress are too many, over how many steps: with noise, a few say nothing.
_PATIENCE = 15
_PATIENT_STEPS = 150
#: The same before the first progress: a plateau takes its time.
_PLATEAU_STEPS = 400
#: How many times its first value a loss has to reach to count as exploded, which noise does not do.
_EXPLOSION = 4.0
#: And by how many times its noise it has to leap there at once for the network to be lost.
_LEAP = 10.0
#: Below this part of its first value a loss has nothing left to learn, and its gradient is lost in rounding.
_LEARNED = 1e-6
#: How near a loss is to its first value if the network is at chance, relative to that value.
_CHANCE = 0.02
#: How far above its level of the last progress the rate may climb without any more.
_CLIMB = math.log(4.0)
#: How far the rate falls when the loss is back at its first value.
_FALL = math.log(10.0)
#: How fast the log of the rate may climb per step on a plateau, below its limit and above.
_SLOWLY, _MORE_SLOWLY = 0.06, 0.01
#: How many observations it takes to see whether a network starts on a plateau.
_FIRST_LOOKS = 10
#: The part of a loss's rise that earlier weights have to take back for the network to be lost.
_RESTORED = 0.5
#: How many times its noise a loss has to be lower than at the first weights, on the same batch, for a beginning: after
#: a plateau it has to be beyond doubt.
_LOWER, _LOWER_AFTER_PLATEAU = 0.5, 2.0
#: The same before that, relative to the first loss and to the noise: an easy first batch hides for hundreds of steps
#: that the network learns. On a plateau outputs may just have learned the mean of the targets.
_BEGUN, _BEGUN_ON_PLATEAU = (0.01, 0.1), (0.05, 2.0)
#: How many more of the parameters than at first have no gradient in a dead network, and for how many observations.
_SILENT = 0.5
_SILENT_TIMES = 3
#: How often weights may go back: a network that is lost again and again has another fault.
_RETURNS = 3


class Progress:
    """Follows the loss and the log of the rate from meta-step to meta-step.

    Progress is a new minimum of the averaged loss, by more than a hundredth and more than a tenth of the noise.

    Attributes:
        standing: What the last observation says about the network.
        is_waiting: Whether the first progress has been overdue for long, without noise that would explain it.

    Example:
        >>> progress = Progress()
        >>> for n in range(60):
        ...     outcome = Outcome(10 * n, loss=2.3, objective=2.3)  # the loss stays the same
        ...     allowed = progress.observe(outcome, 0.1 * n)  # while the rate climbs
        ...     if progress.standing is Standing.LOST:
        ...         print(10 * n, allowed < 0.1 * n)
        ...         break
        400 True
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0  # this average and the next lack their bias correction
        self._variance = 0.0
        self._first = math.inf
        self._highest = -math.inf
        self._best = math.inf
        self._since = 0  # observations since the last progress
        self._last_step = 0  # when that was, or when waiting for it began
        self._level = math.inf  # log of the rate at the last progress
        self._ceiling = math.inf  # of the log of the rate, until there is progress
        self._start = math.inf  # of the log of the rate
        self._limit = math.inf  # of the log of the rate, until there is progress
        self._on_plateau = True
        self._has_begun = False
        self._returns = 0
        self._silent_at_first = 0.0
        self._silent_times = 0
        self.is_waiting = False
        self.standing = Standing.AS_BEFORE

    def hold(self, start: float, limit: float) -> None:
        """Until there is progress, let the log of the rate climb from ``start`` to ``limit``; on a plateau, slowly."""
        self._start, self._limit = start, limit

    @property
    def has_begun(self) -> bool:
        """Whether there has been any progress."""
        return self._has_begun

    @property
    def on_plateau(self) -> bool:
        """Whether training began on a plateau, or it is too early to know."""
        return self._on_plateau

    def is_learned(self, loss: float) -> bool:
        """Return whether a loss is down at rounding, as that of a discriminator that tells all its examples apart."""
        return abs(loss) < _LEARNED * abs(self._first) < math.inf

    def observe(self, outcome: Outcome, log_rate: float) -> float:
        """Take in a meta-step and return what the log of the rate may be at most.

        Args:
            outcome: Of its look-ahead.
            log_rate: The log of the rate that is wanted after it.
        """
        step, loss, setback = outcome.step, outcome.loss, outcome.setback
        self.standing = Standing.AS_BEFORE
        # A hinge loss that is satisfied leaves no gradient either, at a loss that is better than ever.
        is_silent = outcome.silent > self._silent_at_first + _SILENT and loss > self._best
        self._silent_times = self._silent_times + 1 if is_silent else 0
        if not math.isfinite(loss) or self._silent_times == _SILENT_TIMES:
            self._lose(step, log_rate)
            return min(log_rate, self._ceiling)
        last = self._mean / (1.0 - _MEMORY**self._count) if self._count else loss
        quiet = math.sqrt(self._variance / (1.0 - _MEMORY**self._count)) if self._count else 0.0
        if self._explodes(loss) and self._count >= _FIRST_LOOKS and loss > last + _LEAP * quiet:
            rise = loss - self._best
            if self._are_to_blame(setback, rise, quiet):
                self._highest = loss
                self._lose(step, log_rate)
            else:
                self._count, self._mean, self._variance = 0, 0.0, 0.0
                # Weights that are far better than earlier ones, at a far higher loss: another network moves the loss.
                if setback is not None and setback() < -max(rise, quiet):
                    self._ceiling, self.standing = log_rate - _FALL, Standing.HELD_BACK
                else:
                    self._begin_again(step, loss, log_rate)
            return min(log_rate, self._ceiling)
        self._count += 1
        correction = 1.0 - _MEMORY**self._count
        self._mean = _MEMORY * self._mean + (1.0 - _MEMORY) * loss
        self._variance = _MEMORY * self._variance + (1.0 - _MEMORY) * (loss - last) ** 2
        mean, noise = self._mean / correction, math.sqrt(self._variance / correction)
        self._since += 1
        if loss > self._highest and (not self._explodes(loss) or self._are_to_blame(setback, loss - self._best, quiet)):
            self._highest = loss
        if self._first == math.inf:  # before any step: what a network that learns will fall below
            self._first, self._best, self._level, self._silent_at_first = loss, loss, log_rate, outcome.silent
            self.standing = Standing.BETTER  # there is nothing better to go back to
        near = _CHANCE * abs(self._first)
        if self._count == _FIRST_LOOKS:
            self._on_plateau = not self._has_begun and noise <= near
        if self._on_plateau and not self._has_begun:
            # Its end has to be beyond doubt, because it ends the caution, and to be seen at once: in one loss or, where
            # small batches have become noisy since, in the average.
            at_once = self._count > 1 and loss < self._first - max(0.01 * abs(self._first), 4.0 * quiet)
            is_better = at_once or (self._count > _FIRST_LOOKS and mean < self._first - 2.0 * max(near, noise))
        else:
            is_better = mean < self._best - max(0.01 * abs(self._best), 0.1 * noise)
        if not (is_better or self._has_begun) and self._count % _FIRST_LOOKS == 0 and setback is not None:
            part, times = _BEGUN_ON_PLATEAU if self._on_plateau else _BEGUN
            is_better = setback() < -max(part * abs(self._first), times * noise)
        if is_better:
            self._best, self._since, self._level, self._ceiling = mean, 0, log_rate, math.inf
            self._has_begun, self._last_step = True, step
            self.standing = Standing.BETTER
            return log_rate
        waited = step - self._last_step
        self.is_waiting = not self._has_begun and waited >= _PATIENT_STEPS and noise <= near
        if self._since > _PATIENCE and waited >= _PATIENT_STEPS:
            self._after_long(step, log_rate, mean, noise, setback)
        slowly = self._level + _CLIMB + outcome.pace * _MORE_SLOWLY * waited
        return min(log_rate, self._ceiling, slowly if self._has_begun else self._slowly(step, outcome.pace))

    def _slowly(self, step: int, pace: float) -> float:
        """Return how far the log of the rate may have climbed before the first progress."""
        if not self._on_plateau:
            return self._limit
        climbed = self._start + pace * _SLOWLY * (step - self._last_step)
        if climbed <= self._limit:
            return climbed
        return self._limit + (climbed - self._limit) * _MORE_SLOWLY / _SLOWLY

    def _after_long(
        self, step: int, log_rate: float, mean: float, noise: float, setback: Callable[[], float] | None
    ) -> None:
        """Find out why the loss has not fallen for long: the weights, the data or the other player of a game."""
        near = _CHANCE * abs(self._first)
        is_high, at_first = mean >= self._first, abs(mean - self._first) <= near
        if not self._has_begun:
            lower = _LOWER_AFTER_PLATEAU if self._on_plateau else _LOWER
            if setback is not None and setback() < -lower * noise:
                self._has_begun, self.is_waiting = True, False
                self._begin_again(step, mean, log_rate)
                return
            if step - self._last_step < _PLATEAU_STEPS:
                return
            # Outputs that hardly depend on the inputs have a loss without noise; a network that was trained before may
            # as well stay at its first loss, but with noise.
            is_high, at_first = False, at_first and noise <= near
        elif setback is not None and (at_first or is_high):
            behind, rise = setback(), mean - self._best
            # Weights that are far better than earlier ones, at a loss above the first: somebody else moves the loss.
            is_driven = is_high and behind < -max(rise, noise)
            if not is_driven and behind <= max(_RESTORED * rise, 2.0 * noise):
                self._begin_again(step, mean, log_rate)
                return
            at_first = at_first and not is_driven
        if at_first:
            self._lose(step, log_rate)
        elif self._ceiling > self._level and log_rate > self._level + _CLIMB:
            self._ceiling, self.standing = self._level, Standing.HELD_BACK
        elif is_high:
            self._since, self._last_step, self._ceiling = 0, step, log_rate - _FALL
            self.standing = Standing.HELD_BACK

    def _are_to_blame(self, setback: Callable[[], float] | None, rise: float, noise: float) -> bool:
        """Return whether the loss has risen because of the weights; nothing speaks against it if none are kept."""
        return setback is None or not setback() <= max(_RESTORED * rise, 2.0 * noise)

    def _begin_again(self, step: int, loss: float, log_rate: float) -> None:
        """Take the loss of now as the first one, and the weights of now as good ones."""
        self._first = self._best = self._highest = loss
        self._since, self._last_step, self._level, self._ceiling = 0, step, log_rate, math.inf
        self.standing = Standing.BETTER

    def _lose(self, step: int, log_rate: float) -> None:
        """Continue from the last good weights at a quarter of their rate, or climb from a quarter of the start."""
        self._returns += 1
        self.standing = Standing.LOST if self._returns <= _RETURNS else Standing.HELD_BACK
        if self._has_begun:
            self._ceiling = min(self._level, log_rate) - _CLIMB
        else:
            self._ceiling = log_rate - _CLIMB
            self._start = min(self._start, self._level, self._ceiling) - _CLIMB
            self._limit = min(self._limit, self._ceiling)
            self._level = self._start
        self._count, self._mean, self._variance = 0, 0.0, 0.0
        self._since, self._last_step, self._silent_times = 0, step, 0

    def _explodes(self, loss: float) -> bool:
        return loss > self._first + (_EXPLOSION - 1.0) * abs(self._first)

    @property
    def has_exploded(self) -> bool:
        """Whether a loss was far above the first one: steps were too long, and may have left their mark."""
        return self._explodes(self._highest)

    def sentences(self, can_go_back: bool = True) -> list[str]:
        """Return what the user should know after the last observation.

        Args:
            can_go_back: Whether earlier weights are kept.
        """
        if self.standing is Standing.LOST:
            return [LOST if can_go_back else LOST_FOR_GOOD]
        if self.standing is Standing.HELD_BACK:
            return [CLIMBED]
        if self.is_waiting:
            return [WAITING]
        return [EXPLODED] if self.has_exploded else []

    def state_dict(self) -> dict[str, float | str]:
        """Return plain values."""
        return vars(self) | {"standing": self.standing.value}

    def load_state_dict(self, state: dict[str, float | str]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        vars(self).update(state)
        self.standing = Standing(self.standing)
