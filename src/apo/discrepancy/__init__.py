r"""Output-space divergences :math:`\rho`: how far a step moves what the network predicts.

The function-space discrepancy of the proximal objective (Eq. 3) averages one of them over a batch. The choice sets the
curvature :math:`G` of Theorem 1: a KL divergence gives the Fisher information matrix, the Bregman divergence of the
loss gives the generalized Gauss-Newton matrix.

========================  ==========================================  =============================
discrepancy               outputs                                     Hessian at equal outputs
========================  ==========================================  =============================
:class:`CategoricalKL`    logits over classes                         diag(p) - p p^T
:class:`BernoulliKL`      logits of binary variables                  diag(p (1 - p))
:class:`GaussianKL`       means, or means and log-variances           diag(1/v), diag(1/2)
:class:`PoissonKL`        log-rates of counts                         diag(rate)
:class:`SquaredError`     any                                         identity (times 2/d: "mean")
:class:`HuberDistance`    any, with a loss that grows linearly        identity times slope/delta
:class:`Bregman`          whatever the loss accepts                   Hessian of the loss
========================  ==========================================  =============================

:func:`for_loss` picks the one that matches a torch loss.
"""

from .base import Discrepancy, TensorDiscrepancy
from .distances import HuberDistance, SquaredError
from .distributions import BernoulliKL, CategoricalKL, GaussianKL, PoissonKL
from .matching import Bregman, for_loss

__all__ = [
    "Discrepancy",
    "TensorDiscrepancy",
    "CategoricalKL",
    "BernoulliKL",
    "GaussianKL",
    "PoissonKL",
    "SquaredError",
    "HuberDistance",
    "Bregman",
    "for_loss",
]
