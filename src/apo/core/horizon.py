r"""The end of training, where it is known: how much the loss on the other batch counts on the way there.

The loss on the step's own batch B cannot see that a part of its gradient is noise, so the rate that it prefers does not
fall at the end of training. The loss on another batch B' sees it, but is greedy: it trades progress that later steps
would have made for a lower loss after this one, which is the short-horizon bias of the paper's appendix D. For the last
step of all the greedy choice is the right one, because nothing comes after it. So, where the number of steps T is
known, the share of the loss term on B' rises over the second half of training from its usual value to 1,

.. math::
    \alpha_t = \alpha + (1 - \alpha) \max(0, 2 t / T - 1),

and a learned rate falls as far as the noise of the gradients asks for. The paper has nothing of the kind.
"""

from __future__ import annotations

from apo.arguments import whole_number

__all__ = ["Horizon"]

#: After which part of the steps the end comes near.
_START = 0.5


class Horizon:
    """How many steps training takes.

    Args:
        total_steps: T, the steps of the optimizer from the first to the last.

    Example:
        >>> horizon = Horizon(1000)
        >>> [horizon.nearness(step) for step in (0, 500, 750, 1000)]
        [0.0, 0.0, 0.5, 1.0]
    """

    def __init__(self, total_steps: int) -> None:
        advice = "the batches of an epoch times the epochs, divided by the micro-batches of a step if there are more"
        self.total_steps = whole_number("total_steps", total_steps, advice)

    def nearness(self, step: int) -> float:
        """Return how near the end is: 0 in the first half, rising to 1, and 1 beyond the end."""
        return min(max((step / self.total_steps - _START) / (1.0 - _START), 0.0), 1.0)

    def is_over(self, step: int) -> bool:
        """Tell whether the last step is behind, counted from 0."""
        return step >= self.total_steps
