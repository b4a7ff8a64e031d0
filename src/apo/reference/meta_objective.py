r"""The approximate meta-objective of Theorem 1 and its minimiser.

With the loss linearised and the FSD term expanded to second order, the meta-objective for a preconditioner :math:`P`
and mini-batch gradients :math:`g` is

.. math:: \hat{\mathcal Q}(P) = \mathbb E_g\Big[-g^\top P g
          + \frac{\lambda_{\mathrm{FSD}}}{2} g^\top P^\top G P g
          + \frac{\lambda_{\mathrm{WSD}}}{2} \|P g\|^2\Big]

up to a constant. (The theorem's statement in Appendix G omits the factor 1/2 of the FSD term; its proof has it.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def approximate_meta_objective(
    preconditioner: Tensor, gradients: Tensor, curvature: Tensor, *, fsd_weight: float, wsd_weight: float
) -> Tensor:
    r"""Evaluate :math:`\hat{\mathcal Q}(P)`, differentiably in :math:`P`.

    Args:
        preconditioner: :math:`P`, shape ``[m, m]``.
        gradients: Mini-batch gradients, shape ``[batches, m]``; the expectation is their mean.
        curvature: :math:`G`, the Hessian of the FSD, shape ``[m, m]``.
        fsd_weight: :math:`\lambda_{\mathrm{FSD}}`.
        wsd_weight: :math:`\lambda_{\mathrm{WSD}}`.

    Example:
        >>> I = torch.eye(2)
        >>> approximate_meta_objective(I, I, I, fsd_weight=1.0, wsd_weight=0.0)
        tensor(-0.5000)
    """
    steps = -gradients @ preconditioner.T
    loss = (gradients * steps).sum(dim=1)
    fsd = ((steps @ curvature) * steps).sum(dim=1) / 2
    wsd = steps.square().sum(dim=1) / 2
    return (loss + fsd_weight * fsd + wsd_weight * wsd).mean()


def optimal_preconditioner(curvature: Tensor, *, fsd_weight: float, wsd_weight: float) -> Tensor:
    r"""Return :math:`P^\star = (\lambda_{\mathrm{FSD}} G + \lambda_{\mathrm{WSD}} I)^{-1}` (Theorem 1).

    The minimiser is unique if the second moment :math:`\mathbb E[g g^\top]` is non-singular.

    Args:
        curvature: :math:`G`, shape ``[m, m]``.
        fsd_weight: :math:`\lambda_{\mathrm{FSD}}`.
        wsd_weight: :math:`\lambda_{\mathrm{WSD}}`.

    Example:
        >>> optimal_preconditioner(torch.eye(2), fsd_weight=1.0, wsd_weight=1.0)
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])
    """
    identity = torch.eye(curvature.shape[0], dtype=curvature.dtype, device=curvature.device)
    return torch.linalg.inv(fsd_weight * curvature + wsd_weight * identity)
