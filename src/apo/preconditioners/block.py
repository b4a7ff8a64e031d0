"""The part of a preconditioner that belongs to one layer: a learned positive semi-definite matrix.

A block holds its matrix P as a few small factors and never builds it. It answers two questions with matrix
products alone: what is P G, and how does an inner product with P G change with each factor. The second is all
that learning needs, so no graph is ever recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

__all__ = ["Block"]


class Block(ABC):
    r"""A learned positive semi-definite matrix :math:`P` that acts on gradients of one shape.

    Every block starts as the identity. Arithmetic happens in the factors' type, float32 at least: 16-bit
    gradients are widened, and an autocast that happens to be active is ignored.

    Attributes:
        shape: Shape of the gradients that the block takes.
        factors: The learned tensors by name, leaves that do not require gradients; their order never changes.

    Example:
        >>> from apo.preconditioners import DiagonalBlock
        >>> block = DiagonalBlock((2,))
        >>> _ = block.factors["s"].copy_(torch.tensor([1.0, 2.0]))
        >>> block.apply(torch.tensor([1.0, 1.0]))
        tensor([1., 4.])
    """

    def __init__(self, shape: Sequence[int], factors: Mapping[str, Tensor]) -> None:
        self.shape = tuple(shape)
        self.factors = dict(factors)

    def apply(self, gradient: Tensor) -> Tensor:
        """Return P G.

        Args:
            gradient: G, of shape ``self.shape`` and of any floating type.

        Returns:
            A tensor of the same shape, in the factors' type.

        Raises:
            ValueError: If the shape is another.
        """
        with self._without_autocast():
            return self._apply(self._read("gradient", gradient))

    def pull_back(self, gradient: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        r"""Return the gradient of :math:`\langle C, P G \rangle` with respect to each factor.

        Args:
            gradient: G, as given to :meth:`apply`.
            cotangent: C, of the same shape.

        Returns:
            One tensor for each entry of ``self.factors``, of the factor's shape.

        Raises:
            ValueError: If a shape is another than ``self.shape``.
        """
        with self._without_autocast():
            return self._pull_back(self._read("gradient", gradient), self._read("cotangent", cotangent))

    def summary(self) -> dict[str, Tensor]:
        """Return a few numbers for a log, as 0-dimensional tensors on the block's device.

        Returns:
            ``mean_eigenvalue``: the trace of P divided by its size, 1 at the start.
        """
        with self._without_autocast():
            return {"mean_eigenvalue": self._trace() / prod(self.shape)}

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Return P as a matrix ``[n, n]`` that acts on ``gradient.reshape(-1)``; for small blocks."""

    @abstractmethod
    def _apply(self, gradient: Tensor) -> Tensor: ...

    @abstractmethod
    def _pull_back(self, gradient: Tensor, cotangent: Tensor) -> dict[str, Tensor]: ...

    @abstractmethod
    def _trace(self) -> Tensor: ...

    def _read(self, name: str, tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) != self.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but this block takes {self.shape}: "
                "pass a tensor that the layer's view has gathered."
            )
        return tensor.to(self._any_factor().dtype)

    def _without_autocast(self) -> torch.autocast:
        # A meta-step may run inside the user's autocast region, which would do these products in 16 bits.
        return torch.autocast(self._any_factor().device.type, enabled=False)

    def _any_factor(self) -> Tensor:
        return next(iter(self.factors.values()))


def factor_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which factors for gradients of type ``dtype`` are kept: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
