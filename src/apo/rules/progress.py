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
does not bring it back, so the weights go back, too, if earlier ones are kept (:class:`ReturnPoint`). The user is told
in any case.

**The start.** Until the loss has fallen for the first time the rate has a limit. Deep networks without normalisation
begin on a plateau: the outputs hardly depend on the inputs, so the loss hardly differs from batch to batch, the
curvature is tiny, and the turning point is a hundred times that of the network which leaves the plateau. There the rate
climbs to its limit by 6% a step, and beyond by 1%: the plateau then ends at about the lowest rate that ends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from apo.rules.base import Standing
from apo.vectors import assign_, copies, norm

__all__ = ["Progress", "ReturnPoint"]

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
    "the network is lost: its loss is no better than before the first step. No earlier weights are kept so late in "
    "training, or for an optimizer that had a state before its first step, so only the rate was lowered: go back to a "
    "checkpoint"
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
#: How many more of the parameters than at first have no gradient in a dead network, and for how many observations.
_SILENT = 0.5
_SILENT_TIMES = 3
#: How often weights may go back: a network that is lost again and again has another fault.
_RETURNS = 3

#: After so many steps no copy of the weights is kept: it costs memory, and a network that has learned so long is rarely
#: lost.
_STEPS = 2000
#: A loss that has grown by this factor says that the weights have exploded, not that a gradient is faulty.
_FAR = 100.0


class Progress:
    """Follows the loss and the log of the rate from meta-step to meta-step.

    Progress is a new minimum of the averaged loss, by more than a hundredth and more than a tenth of the noise.

    Attributes:
        standing: What the last observation says about the network.
        is_waiting: Whether the first progress has been overdue for long, without noise that would explain it.

    Example:
        >>> progress = Progress()
        >>> for n in range(60):
        ...     allowed = progress.observe(10 * n, 2.3, 0.1 * n)  # the rate climbs, the loss stays the same
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

    def observe(self, step: int, loss: float, log_rate: float, silent: float = 0.0, pace: float = 1.0) -> float:
        """Take in the loss at a meta-step and the log of the rate after it; return what that log may be at most.

        Args:
            step: Index of the training step.
            loss: The loss before it.
            log_rate: The log of the rate that is wanted.
            silent: The share of the parameters whose gradient is exactly zero.
            pace: How many times faster than usual the rate may climb.
        """
        self.standing = Standing.AS_BEFORE
        # A hinge loss that is satisfied leaves no gradient either, at a loss that is better than ever.
        is_silent = silent > self._silent_at_first + _SILENT and loss > self._best
        self._silent_times = self._silent_times + 1 if is_silent else 0
        if not math.isfinite(loss) or self._silent_times == _SILENT_TIMES:
            self._lose(step, log_rate)
            return min(log_rate, self._ceiling)
        last = self._mean / (1.0 - _MEMORY**self._count) if self._count else loss
        quiet = math.sqrt(self._variance / (1.0 - _MEMORY**self._count)) if self._count else 0.0
        if self._explodes(loss) and self._count >= _FIRST_LOOKS and loss > last + _LEAP * quiet:
            self._highest = loss
            self._lose(step, log_rate)
            return min(log_rate, self._ceiling)
        self._count += 1
        correction = 1.0 - _MEMORY**self._count
        self._mean = _MEMORY * self._mean + (1.0 - _MEMORY) * loss
        self._variance = _MEMORY * self._variance + (1.0 - _MEMORY) * (loss - last) ** 2
        mean, noise = self._mean / correction, math.sqrt(self._variance / correction)
        self._since += 1
        self._highest = max(self._highest, loss)
        if self._first == math.inf:  # before any step: what a network that learns will fall below
            self._first, self._best, self._level, self._silent_at_first = loss, loss, log_rate, silent
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
        if is_better:
            self._best, self._since, self._level, self._ceiling = mean, 0, log_rate, math.inf
            self._has_begun, self._last_step = True, step
            self.standing = Standing.BETTER
            return log_rate
        waited = step - self._last_step
        self.is_waiting = not self._has_begun and waited >= _PATIENT_STEPS and noise <= near
        if self._since > _PATIENCE and waited >= (_PATIENT_STEPS if self._has_begun else _PLATEAU_STEPS):
            has_climbed = self._ceiling > self._level and log_rate > self._level + _CLIMB
            # Outputs that hardly depend on the inputs have a loss without noise; a network that was trained before
            # may as well stay at its first loss, but with noise.
            if abs(mean - self._first) <= near and (self._has_begun or noise <= near):
                self._lose(step, log_rate)
            elif has_climbed:
                self._ceiling, self.standing = self._level, Standing.HELD_BACK
            elif self._has_begun and mean >= self._first:
                self._since, self._last_step, self._ceiling = 0, step, log_rate - _FALL
                self.standing = Standing.HELD_BACK
        slowly = self._level + _CLIMB + pace * _MORE_SLOWLY * waited if self._has_begun else self._slowly(step, pace)
        return min(log_rate, self._ceiling, slowly)

    def _slowly(self, step: int, pace: float) -> float:
        """Return how far the log of the rate may have climbed before the first progress."""
        if not self._on_plateau:
            return self._limit
        climbed = self._start + pace * _SLOWLY * (step - self._last_step)
        if climbed <= self._limit:
            return climbed
        return self._limit + (climbed - self._limit) * _MORE_SLOWLY / _SLOWLY

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


class ReturnPoint:
    """The weights at which the loss last fell: one copy of parameters and buffers, in the first steps of training.

    The optimizer's state goes back to what it was before the first step, that is, to nothing. An optimizer that had one
    before its first step, because it builds it early or was loaded, keeps no return point.

    Args:
        model: The network.
        optimizer: Its optimizer.

    Attributes:
        kept: The copies; empty if there is nothing to go back to.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> point = ReturnPoint(model, optimizer)
        >>> point.keep(0, loss=2.3)
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(float("nan"))
        >>> point.go_back(), bool(model.weight.isfinite().all())
        (True, True)
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._can_empty_state = not optimizer.state
        self._tensors: list[Tensor] = []  # those of the network and the optimizer that were there
        self.kept: list[Tensor] = []
        self._owned = 0  # how many of them are the optimizer's parameters
        self._loss = 0.0  # at the weights that are kept

    def keep(self, step: int, loss: float) -> None:
        """Take the weights in force as good ones, if it is early enough in training."""
        if not self._can_empty_state or step >= _STEPS:
            return
        self._loss = loss
        owned = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._owned, self._tensors = len(owned), [*owned, *self._model.buffers()]
        if len(self._tensors) == len(self.kept):
            assign_(self.kept, self._tensors)
        else:  # at first, and when a group was added
            self.kept = copies(self._tensors)

    def expire(self, step: int) -> None:
        """Drop the copy when its time is over: a network that is lost later must not go back as far as that."""
        if step >= _STEPS:
            self._tensors, self.kept = [], []

    def is_far_below(self, loss: float) -> bool:
        """Whether a loss is so high that the weights must have exploded since."""
        return bool(self.kept) and loss > _FAR * abs(self._loss)

    def is_far_from(self, parameters: Sequence[Tensor], agree: Callable[[Tensor], float]) -> bool:
        """Whether parameters are so large, or not finite, that they must have exploded since.

        Args:
            parameters: Those that move.
            agree: Returns one number for all processes.
        """
        if not self.kept:
            return False
        usual = max(agree(norm(self.kept[: self._owned])), 1.0)  # weights may be zero at first
        return not agree(norm(parameters)) <= _FAR * usual

    def go_back(self) -> bool:
        """Put the kept weights into the network and empty the optimizer's state; return False if there are none."""
        if not self.kept:
            return False
        assign_(self._tensors, self.kept)
        self._optimizer.state.clear()
        return True
