"""Update rules: what can be learned, and how the weights move.

- :class:`LearningRate`: the learning rate of any optimizer whose step is linear in it.
- :class:`Preconditioned`: the matrices of a preconditioner.
- :class:`RateAndMomentum`: rate and momentum of SGD together; the pattern for a rule of one's own.
- :class:`Rule` and :class:`Proposal`: what such a rule implements.
"""

from apo.rules.base import Proposal, Rule
from apo.rules.choice import as_rule
from apo.rules.learning_rate import LearningRate
from apo.rules.preconditioned import Preconditioned
from apo.rules.rate_and_momentum import RateAndMomentum

__all__ = ["LearningRate", "Preconditioned", "Proposal", "RateAndMomentum", "Rule", "as_rule"]
