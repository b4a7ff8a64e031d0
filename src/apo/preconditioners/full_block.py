"""A full preconditioner for small problems: any positive semi-definite matrix."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from apo.preconditioners.block import Block, factor_type

__all__ = ["FullBlock"]


@final
class FullBlock(Block):
    r"""The full preconditioner :math:`P = C C^\top` on vectors of length ``n``.

    This is the P of the paper's Theorem 1, made positive semi-definite by its factor. With cotangent c of P
    g, :math:`\partial C = c\,(C^\top g)^\top + g\,(C^\top c)^\top`.

    Args:
        n: Length of the gradient.
        dtype: Type of the gradient; the factor is kept in float32 at least.
        device: Where the factor lives.

    Example:
        >>> block = FullBlock(2)
        >>> _ = block.factors["C"].copy_(torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
        >>> block.to_dense()
        tensor([[4., 2.],
                [2., 2.]])
        >>> block.apply(torch.tensor([1.0, 0.0]))
        tensor([4., 2.])
    """

    def __init__(self, n: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> None:
        super().__init__((n,), {"C": torch.eye(n, dtype=factor_type(dtype), device=device)})

    def to_dense(self) -> Tensor:
        """Return C C^T."""
        return self.factors["C"] @ self.factors["C"].mT

    def _apply(self, gradient: Tensor) -> Tensor:
        factor = self.factors["C"]
        return factor @ (factor.mT @ gradient)

    def _pull_back(self, gradient: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        factor = self.factors["C"]
        return {"C": torch.outer(cotangent, factor.mT @ gradient) + torch.outer(gradient, factor.mT @ cotangent)}

    def _trace(self) -> Tensor:
        return self.factors["C"].square().sum()
