r"""KFAC: Kronecker-factored curvature (Martens and Grosse, 2015; for convolutions Grosse and Martens, 2016).

The Fisher block of a layer, in the layout of :mod:`apo_experiments.baselines.layers`, is approximated as
:math:`\Omega \otimes \Gamma` with

.. math::
    \Omega = \frac{1}{M} \sum_{n,t} a_{nt} a_{nt}^\top, \qquad
    \Gamma = \frac{1}{R} \sum_{n,t} g_{nt} g_{nt}^\top,

M the number of cases in the loss and R the number of rows :math:`(n, t)`: for a convolution, Omega is the batch mean of
the sum over locations and Gamma the mean over both; for a linear layer M = R.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from apo_experiments.baselines.curvature import CurvatureOptimizer
from apo_experiments.baselines.layers import FactoredLayer


@final
class KFAC(CurvatureOptimizer):
    r"""KFAC with homogeneous biases, the true Fisher and factored Tikhonov damping.

    The gradient V ``[out, in]`` becomes :math:`(\Gamma + \tfrac{\sqrt\gamma}{\pi} I)^{-1} V
    (\Omega + \pi\sqrt\gamma I)^{-1}` with damping :math:`\gamma` and
    :math:`\pi^2 = \frac{\operatorname{tr}\Omega / \dim\Omega}{\operatorname{tr}\Gamma / \dim\Gamma}` (section 6.3 of
    Martens and Grosse). The factors are inverted through Cholesky decompositions.

    Args: see :class:`CurvatureOptimizer`.
    """

    def _refresh(self, block: dict[str, Tensor], layer: FactoredLayer) -> None:
        root = self.param_groups[0]["damping"] ** 0.5
        omega, gamma = block["omega"], block["gamma"]
        pi = (_mean_eigenvalue(omega) / _mean_eigenvalue(gamma)).sqrt()
        for name, factor, damping in (("omega_inverse", omega, root * pi), ("gamma_inverse", gamma, root / pi)):
            identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
            cholesky, failed = torch.linalg.cholesky_ex(factor + damping * identity)
            previous = block[name] if name in block else identity / (_mean_eigenvalue(factor) + damping)
            # Where it fails the previous inverse is kept, without waiting for the host.
            block[name] = torch.where(failed == 0, torch.cholesky_inverse(cholesky), previous)

    def _precondition(self, block: dict[str, Tensor], gradient: Tensor) -> Tensor:
        if "gamma_inverse" not in block:  # a layer that was used for the first time since the last inversion
            return gradient
        return block["gamma_inverse"] @ gradient @ block["omega_inverse"]


def _mean_eigenvalue(factor: Tensor) -> Tensor:
    # Zero gradients (a dead layer) would make pi infinite.
    return factor.diagonal().mean().clamp_min(1e-20)
