"""Lower a learned rate that is too high for parameters which begin to move during training.

A head that is trained on frozen layers bears a high rate, and the rate climbs there. When the layers are unfrozen, or
added to the optimizer, the first steps at that rate may destroy them, and with them what they had learned before. So
the first step that moves them is a meta-step, and the rate at which its look-ahead turns is searched for, as before the
first step of all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.rules.base import Proposal, Rule, Slope
from apo.rules.learning_rate import LearningRate
from apo.rules.tail import RateProposal
from apo.rules.warm_start import first_turning_point, rate_of_a_tiny_step

__all__ = ["Newcomers", "lower_for_newcomers"]

#: Where the rate continues, relative to the turning point: one batch says little about the next hundred. A tenth, as at
#: the start of training, cost more than it saved: the others have found their place.
_SHARE = 0.3


class Newcomers:
    """Notices parameters of an optimizer that begin to move after others: unfrozen, or added in a param group.

    Args:
        optimizer: The optimizer.

    Example:
        >>> layers = torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1)
        >>> newcomers = Newcomers(torch.optim.SGD([*layers[0].parameters(), *layers[1].parameters()], lr=0.1))
        >>> newcomers.are_waiting(), layers[0].requires_grad_() is layers[0], newcomers.are_waiting()
        (False, True, True)
        >>> newcomers.have_moved(), newcomers.are_waiting()
        (None, False)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._frozen: list[Tensor] = []  # those that have not moved so far
        self._groups = 0  # how many param groups are known

    def are_waiting(self) -> bool:
        """Return whether parameters will move for the first time; those that can when this is first asked are known."""
        if not self._groups:
            self.have_moved()
        return any(p.requires_grad for p in self._unmoved())

    def have_moved(self) -> None:
        """Take note that all parameters that can move have done so."""
        self._frozen = [p for p in self._unmoved() if not p.requires_grad]
        self._groups = len(self._optimizer.param_groups)

    def _unmoved(self) -> list[Tensor]:
        return self._frozen + [p for group in self._optimizer.param_groups[self._groups :] for p in group["params"]]


@torch.no_grad()
def lower_for_newcomers(rule: Rule, proposal: Proposal, slope: Slope) -> None:
    """Lower the rates of a rule if the look-ahead of a step turns before them.

    Args:
        rule: The rule; one that learns no rate has nothing to lower, and one without a warm start is left alone.
        proposal: The step, in which some parameters move for the first time.
        slope: See :meth:`apo.Rule.first_look`.
    """
    if not (isinstance(rule, LearningRate) and isinstance(proposal, RateProposal) and rule.warm_start):
        return
    rate = rule.learned_rates()[0]
    tiny = rate_of_a_tiny_step(proposal.displacement(), proposal.parameters, rate)
    if tiny is None:
        return
    turn = first_turning_point(lambda other: slope(proposal.displacement(other / rate)), tiny, rule.bounds)
    if turn is not None and turn < rate:
        for parameter in rule.phi():
            parameter.add_(math.log(_SHARE * turn / rate))
        rule._show()
