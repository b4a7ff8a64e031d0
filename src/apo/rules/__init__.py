"""Update rules: what can be learned, and how the weights move.

- :class:`LearningRate`: the learning rate of any optimizer whose step is linear in it.
- :class:`Preconditioned`: the matrices of a preconditioner.
- :class:`RateAndMomentum`: rate and momentum of SGD together; the pattern for a custom rule.
- :func:`register_tail`: tells :class:`LearningRate` how an optimizer that it does not know looks ahead.
- :class:`Rule` and :class:`Proposal`: what a custom rule implements.
"""

from torch.optim import Optimizer

from apo.preconditioners import Preconditioner
from apo.rules.base import Proposal, Rule, moving_parameters
from apo.rules.learning_rate import LearningRate
from apo.rules.preconditioned import Preconditioned
from apo.rules.rate_and_momentum import RateAndMomentum
from apo.rules.tail import register_tail

__all__ = ["LearningRate", "Preconditioned", "Proposal", "RateAndMomentum", "Rule", "as_rule", "moving_parameters"]
__all__ += ["register_tail"]


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
    raise TypeError(
        f"optimizer must be a torch.optim.Optimizer or an apo rule, got {type(rule).__name__}: pass the one that the "
        "training loop steps, such as torch.optim.AdamW(model.parameters())"
    )
