"""Which rule an optimizer gets if the user names none."""

from __future__ import annotations

from torch.optim import Optimizer

from apo.preconditioners import Preconditioner
from apo.rules.base import Rule
from apo.rules.learning_rate import LearningRate
from apo.rules.preconditioned import Preconditioned

__all__ = ["as_rule"]


def as_rule(rule: Rule | Optimizer) -> Rule:
    """Return a rule as it is; learn the matrices of a preconditioner and the learning rate of any other optimizer.

    Raises:
        TypeError: It is neither a rule nor an optimizer.
    """
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, Preconditioner):
        return Preconditioned(rule)
    if isinstance(rule, Optimizer):
        return LearningRate(rule)
    raise TypeError(f"rule must be an apo rule or a torch.optim.Optimizer, got {type(rule).__name__}")
