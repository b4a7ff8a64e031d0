"""Amortized Proximal Optimization: optimizers that tune themselves while they train.

One line in a training loop that exists, ``apo.attach(optimizer, model, criterion)``, or ``apo.APO`` for a loop of one's
own. See the README for both.
"""

from apo import discrepancy
from apo._version import __version__
from apo.core.objective import ProximalObjective
from apo.core.records import History, MetaStep, tensorboard
from apo.discrepancy import (
    BernoulliKL,
    Bregman,
    CategoricalKL,
    Discrepancy,
    GaussianKL,
    HuberDistance,
    PoissonKL,
    SquaredError,
)
from apo.errors import ApoWarning, MissingBatchError, NonFiniteError, NotLinearError, ReplayError
from apo.loop.attach import Attached, attach, criterion
from apo.loop.explicit import APO
from apo.loop.tuner import Tuner
from apo.preconditioners import Diagonal, Eigenbasis, Full, Kronecker, Preconditioner
from apo.rules import LearningRate, Preconditioned, Proposal, RateAndMomentum, Rule, register_tail

__all__ = [
    # front doors
    "APO",
    "attach",
    "criterion",
    "Attached",
    "Tuner",
    # rules
    "LearningRate",
    "Preconditioned",
    "RateAndMomentum",
    "Rule",
    "Proposal",
    "register_tail",
    # preconditioners
    "Kronecker",
    "Eigenbasis",
    "Diagonal",
    "Full",
    "Preconditioner",
    # objective
    "ProximalObjective",
    "Discrepancy",
    "CategoricalKL",
    "BernoulliKL",
    "GaussianKL",
    "PoissonKL",
    "SquaredError",
    "HuberDistance",
    "Bregman",
    "discrepancy",
    # records
    "MetaStep",
    "History",
    "tensorboard",
    # errors
    "ApoWarning",
    "MissingBatchError",
    "NonFiniteError",
    "NotLinearError",
    "ReplayError",
    "__version__",
]
