r"""EKFAC: KFAC's eigenbasis with the second moments of the gradient in it (George et al., 2018).

With :math:`\Omega = U_A \Lambda_A U_A^\top` and :math:`\Gamma = U_G \Lambda_G U_G^\top`, the Fisher block is
approximated as :math:`(U_A \otimes U_G) \operatorname{diag}(S) (U_A \otimes U_G)^\top`, where

.. math:: S = \frac{1}{M} \sum_n \big(U_G^\top \nabla_n U_A\big)^{\odot 2}

are the second moments of the gradients :math:`\nabla_n` of the examples. Of all diagonals in this basis it is the
closest to the Fisher block; KFAC's :math:`\lambda_G \lambda_A^\top` is another.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from apo_experiments.baselines.curvature import CurvatureOptimizer
from apo_experiments.baselines.layers import FactoredLayer

#: The most numbers that the gradients of several examples may take at once.
_CHUNK = 2**26


@final
class EKFAC(CurvatureOptimizer):
    r"""EKFAC: the gradient V becomes :math:`U_G \big[(U_G^\top V U_A) / (S + \gamma)\big] U_A^\top`.

    S is KFAC's :math:`\lambda_G \lambda_A^\top` until an observation finds a basis; then it is a running mean of the
    second moments, which turns with the basis.

    Args: see :class:`CurvatureOptimizer`.
    """

    def _update_statistics(
        self, block: dict[str, Tensor], layer: FactoredLayer, a: Tensor, g: Tensor, cases: Tensor | float
    ) -> None:
        super()._update_statistics(block, layer, a, g, cases)
        if "basis_in" in block:
            self._average(block, "moments", second_moments(a @ block["basis_in"], g @ block["basis_out"], cases))

    def _refresh(self, block: dict[str, Tensor], layer: FactoredLayer) -> None:
        inward, outward = _eigenbasis(block["omega"]), _eigenbasis(block["gamma"])
        if inward is None or outward is None:
            return  # keep the old basis
        if "moments" in block:  # few observations share a basis, so starting again would lose most of them
            # The diagonal, in the new basis, of the curvature that has the moments as its diagonal in the old one.
            shares_in, shares_out = (inward[0].T @ block["basis_in"], outward[0].T @ block["basis_out"])
            block["moments"] = shares_out.square() @ block["moments"] @ shares_in.square().T
        (block["basis_in"], block["values_in"]), (block["basis_out"], block["values_out"]) = inward, outward

    def _precondition(self, block: dict[str, Tensor], gradient: Tensor) -> Tensor:
        if "basis_in" not in block:
            return gradient
        inward, outward = block["basis_in"], block["basis_out"]
        moments = block["moments"] if "moments" in block else torch.outer(block["values_out"], block["values_in"])
        scaled = (outward.T @ gradient @ inward) / (moments + self.param_groups[0]["damping"])
        return outward @ scaled @ inward.T


def second_moments(a: Tensor, g: Tensor, cases: Tensor | float) -> Tensor:
    """Return the second moments ``[out, in]`` of the examples' gradients.

    Args:
        a: Activations in their basis ``[batch, shared, in]``.
        g: Output gradients in theirs ``[batch, shared, out]``.
        cases: M, the number of cases in the loss.
    """
    if a.shape[1] == 1:  # the square of an outer product is the outer product of the squares
        return g[:, 0].square().T @ a[:, 0].square() / cases
    size = max(1, _CHUNK // (a.shape[-1] * g.shape[-1]))
    parts = zip(g.split(size), a.split(size), strict=True)
    return torch.stack([(g_n.transpose(1, 2) @ a_n).square().sum(0) for g_n, a_n in parts]).sum(0) / cases


def _eigenbasis(factor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return eigenvectors (columns) and eigenvalues, or None where the decomposition fails."""
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        try:
            values, vectors = (part.to(factor.dtype) for part in torch.linalg.eigh(factor.double()))
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            return None
    return vectors, values.clamp_min(0.0)
