"""A diagonal preconditioner: one learned rate per element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from apo.preconditioners.block import Block, factor_type

__all__ = ["DiagonalBlock"]


@final
class DiagonalBlock(Block):
    r"""The diagonal preconditioner :math:`P = \mathrm{diag}(s)^2`.

    Its pull-back is :math:`\partial s = 2\, s \odot G \odot C`.

    Args:
        shape: Shape of the gradient; any number of dimensions, also none.
        dtype: Type of the gradient; the factor is kept in float32 at least.
        device: Where the factor lives.

    Example:
        >>> block = DiagonalBlock((3,))
        >>> block.apply(torch.ones(3))
        tensor([1., 1., 1.])
        >>> block.pull_back(torch.ones(3), torch.ones(3))["s"]
        tensor([2., 2., 2.])
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(shape, {"s": torch.ones(tuple(shape), dtype=factor_type(dtype), device=device)})

    def to_dense(self) -> Tensor:
        """Return diag(s)^2."""
        return torch.diag(self.factors["s"].reshape(-1).square())

    def _apply(self, gradient: Tensor) -> Tensor:
        return self.factors["s"].square() * gradient

    def _pull_back(self, gradient: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        return {"s": 2.0 * self.factors["s"] * gradient * cotangent}

    def _trace(self) -> Tensor:
        return self.factors["s"].square().sum()
