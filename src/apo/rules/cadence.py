r"""The course of a learned rate's training: how often it looks ahead, and when it may still rise.

**The start.** The first steps are all meta-steps where B' has its say; without it a rate would climb on noise. So are
the next ones while the rate is below its target by more than a factor of e. A network that leaves a plateau, or that
goes back to earlier weights, starts again.

**The middle.** The older a run, the slower its best rate moves, and the rarer its meta-steps.

**The end.** Where the number of steps is known the rate in force falls linearly to zero. Curvature grows where steps
become shorter, so the turning point follows the rate down; a rate that was still learned would fall twice, and did:
over 200 epochs of ResNet-32 to an eighteenth, beside the linear factor. So a rate that has arrived rests. It looks
ahead from the rate in force, and may fall if even that is too high, but not rise.

**A scheduler of the user's** may leave a part of the learned rate in force, too, and not only at the end. So a rate
under a scheduler looks ahead at that part where the batches are compared. It falls if even this part is too high, and
may still rise if all of it is too low (:class:`apo.rules.turning_point.TurningPoint`). On 14 small tasks that is 0.5
to 1% better at the end of a cosine, with a linear warm-up or without, than a look-ahead at all of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["INTERVALS", "Cadence"]

#: How many steps a start takes, and until which step it may take longer where the rate is far below its target: by how
#: much, as a logarithm. Not after a plateau, where the rate would run into what comes next.
_EARLY, _STILL_EARLY, _FAR = 50, 100, 1.0
#: By how much a rate may be below its target, as a logarithm, to have arrived: look-aheads are noisy.
_NEAR = math.log(1.5)
#: The smallest part of a learned rate at which to look ahead: less is lost in rounding.
_LEAST_PART = 0.01
#: Pairs of a step and the interval between meta-steps before it.
INTERVALS: tuple[tuple[float, int], ...] = ((_EARLY, 1), (500, 10), (1500, 20), (5000, 40), (math.inf, 100))


class Cadence:
    """Knows whether training is at a start, where every step is a meta-step, or at an end, where the rate rests.

    There is no start if the user has chosen another interval.

    Example:
        >>> cadence = Cadence()
        >>> cadence.start()
        >>> cadence.observe(49), cadence.is_start
        (None, True)
        >>> cadence.observe(50), cadence.is_start
        (None, False)
        >>> cadence.rests(fade=1.0), cadence.rests(fade=0.9)
        (False, True)
    """

    def __init__(self) -> None:
        self._last_step = 0  # of the look-aheads
        self._until = 0  # the end of the last start; 0 if there was none
        self._lag = 0.0  # of the learned rate behind its target, as a logarithm

    @property
    def is_start(self) -> bool:
        """Whether the next step belongs to a start."""
        return self._last_step < self._until

    def rests(self, fade: float) -> bool:
        """Return whether the rate may only fall.

        Args:
            fade: The factor of the end of training; 1 before it begins.
        """
        return fade < 1.0 and self._lag < _NEAR and not self.is_start

    def part(self, factor: float, fade: float) -> float:
        """Return the part of the learned rate at which to look ahead: that in force, from a hundredth to all of it.

        Args:
            factor: That of the user's scheduler; the largest, if param groups have several.
            fade: The factor of the end of training, which does not count while the rate still has to arrive.
        """
        return min(max(factor * (fade if self.rests(fade) else 1.0), _LEAST_PART), 1.0)

    def start(self) -> None:
        """Begin training with a start."""
        self._until = _EARLY

    def observe(self, step: int, lag: float = 0.0, again: bool = False, hurries: bool = True) -> None:
        """Take in a look-ahead: after the first start there may be another, or it may take longer.

        Args:
            step: Its step.
            lag: The log of the target over the learned rate; 0 if the look-ahead said nothing.
            again: Whether the network has just left a plateau, or has gone back to earlier weights.
            hurries: Whether a start may take longer.
        """
        self._last_step, self._lag = step, lag
        if self._until and again:
            self._until = step + _EARLY
        if self._until and hurries and lag > _FAR and step < _STILL_EARLY:
            self._until = max(self._until, step + 1)

    def pace(self, step: int, pace: float) -> float:
        """Return how many times faster than usual a rate may rise: only a start is in a hurry.

        Where a network has fitted its data, curvature vanishes and rates run away.

        Args:
            step: The step.
            pace: What the length of training suggests.
        """
        return pace if step - (self._until - _EARLY) < _EARLY / pace else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {"last_step": self._last_step, "until": self._until, "lag": self._lag}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self._last_step, self._until, self._lag = state["last_step"], state["until"], float(state["lag"])
