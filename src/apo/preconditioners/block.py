"""The part of a preconditioner that belongs to one layer: a learned positive semi-definite matrix.

A block holds its matrix P as a few small factors and never builds it. It answers two questions with matrix
products alone: what is P G, and how does an inner product with P G change with each factor. The second is all
that learning needs, so no graph is ever recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from apo.preconditioners.matmul import operand_type, tf32

__all__ = ["Block"]


class Block(ABC):
    r"""A learned positive semi-definite matrix :math:`P` that acts on gradients of one shape.

    Every block starts as the identity. Arithmetic happens in the factors' type, float32 at least: 16-bit
    gradients are widened, and an autocast that happens to be active is ignored. Only the operands of matrix
    products may be narrower, if ``matmul`` says so.

    Attributes:
        shape: Shape of the gradients that the block takes.
        factors: The learned tensors by name, leaves that do not require gradients; their order never changes.
        matmul: Precision of products with factors: ``"float32"``, ``"tf32"`` or ``"bfloat16"``.
        stackable: Whether the arithmetic holds for factors and gradients with one more dimension in front, so that
            blocks of one shape can be computed as one; see :mod:`apo.preconditioners.product.bundles`.
        lead: How many such dimensions this block has.

    Example:
        >>> from apo.preconditioners import DiagonalBlock
        >>> block = DiagonalBlock((2,))
        >>> _ = block.factors["s"].copy_(torch.tensor([1.0, 2.0]))
        >>> block.apply(torch.tensor([1.0, 1.0]))
        tensor([1., 4.])
    """

    stackable: ClassVar[bool] = False
    matmul: str = "float32"
    lead: int = 0

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
        with self._arithmetic():
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
        with self._arithmetic():
            return self._pull_back(self._read("gradient", gradient), self._read("cotangent", cotangent))

    def summary(self) -> dict[str, Tensor]:
        """Return a few numbers for a log, as 0-dimensional tensors on the block's device.

        Returns:
            ``mean_eigenvalue``: the trace of P divided by its size, 1 at the start. (One for each of the blocks that
            are stacked in this one.)
        """
        with self._arithmetic():
            return {"mean_eigenvalue": self._trace() / prod(self.shape[self.lead :])}

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

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        # A meta-step may run inside the user's autocast region, which would do these products in 16 bits.
        with torch.autocast(self._any_factor().device.type, enabled=False):
            if self.matmul != "tf32":
                yield
                return
            with tf32():
                yield

    def _matrix(self, name: str) -> Tensor | None:
        """Return a factor as it enters matrix products, or None if the block has no such factor."""
        factor = self.factors.get(name)
        return None if factor is None else self._narrow(factor)

    def _narrow(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the type in which it enters matrix products."""
        if len(self.factors) == 1:
            return tensor  # a scale alone: there are no products
        return tensor.to(operand_type(self.matmul, self._any_factor().dtype))

    def _wide(self, tensor: Tensor) -> Tensor:
        """Return the result of matrix products in the factors' type."""
        return tensor.to(self._any_factor().dtype)

    def _any_factor(self) -> Tensor:
        return next(iter(self.factors.values()))


def factor_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which factors for gradients of type ``dtype`` are kept: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
