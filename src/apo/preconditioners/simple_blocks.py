"""The blocks without structure: diagonal, and full."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import final

import torch
from torch import Tensor

from apo.preconditioners.block import Block, factor_type

__all__ = ["DiagonalBlock", "FullBlock"]


@final
class DiagonalBlock(Block):
    r"""The diagonal preconditioner :math:`P = \mathrm{diag}(s)^2`.

    With gradient g and cotangent h its pull-back is :math:`\partial s = 2\, s \odot g \odot h`.

    Args:
        shape: Shape of the gradient; any number of dimensions, including none.
        dtype: Type of the gradient; the factor is at least float32.
        device: Where the factor lives.

    Example:
        >>> block = DiagonalBlock((3,))
        >>> block.apply(torch.ones(3))
        tensor([1., 1., 1.])
        >>> block.pull_back(torch.ones(3), torch.ones(3))["s"]
        tensor([2., 2., 2.])
    """

    def __init__(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> None:
        super().__init__(shape, {"s": torch.ones(tuple(shape), dtype=factor_type(dtype), device=device)})

    @classmethod
    @torch.no_grad()
    def concatenated(cls, blocks: Sequence[Block]) -> DiagonalBlock:
        """Return one block for the concatenated gradients of diagonal blocks of one type and device."""
        factors = [block.factors["s"].reshape(-1) for block in blocks]
        size = sum(prod(block.shape) for block in blocks)
        joint = cls((size,), dtype=factors[0].dtype, device=factors[0].device)
        torch.cat(factors, out=joint.factors["s"])
        return joint

    def to_dense(self) -> Tensor:
        """Return diag(s)^2."""
        return torch.diag(self.factors["s"].reshape(-1).square())

    def _apply(self, gradient: Tensor) -> Tensor:
        return self.factors["s"].square() * gradient

    def _pull_back(self, gradient: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        return {"s": 2.0 * self.factors["s"] * gradient * cotangent}

    def _trace(self) -> Tensor:
        return self.factors["s"].square().sum()


@final
class FullBlock(Block):
    r"""The full preconditioner :math:`P = C C^\top` on vectors of length ``n``.

    This is the P of the paper's Theorem 1, positive semi-definite by construction. With gradient g and cotangent h its
    pull-back is :math:`\partial C = h\,(C^\top g)^\top + g\,(C^\top h)^\top`.

    Args:
        n: Length of the gradient.
        dtype: Type of the gradient; the factor is at least float32.
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
