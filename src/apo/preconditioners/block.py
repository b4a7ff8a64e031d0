"""The part of a preconditioner that belongs to one layer: a learned positive semi-definite matrix.

A block holds its matrix P as a few small factors and never builds it. It answers two questions with matrix
products alone: what is P G, and how does an inner product with P G change with each factor. The second is all
that learning needs, so no graph is ever recorded.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["Block", "check_matmul", "factor_type"]


class Block(ABC):
    r"""A learned positive semi-definite matrix :math:`P` that acts on gradients of one shape.

    Every block starts as the identity. Arithmetic happens in the factors' type, float32 at least: 16-bit
    gradients are widened, and an active autocast is ignored. Only the operands of matrix products may be
    narrower, if ``matmul`` says so.

    Args:
        shape: Shape of the gradients that the block takes.
        factors: The learned tensors by name, leaves that do not require gradients; their order never changes.
        matmul: Precision of products with factors: ``"float32"``, ``"tf32"`` or ``"bfloat16"``.

    Attributes:
        lead: The number of dimensions in front of those of a single block; 1 for :meth:`stacked` blocks.
        stackable: Whether the arithmetic also holds with one more dimension in front of factors and gradients,
            so that :meth:`stacked` may compute blocks of one shape as one.

    Example:
        >>> from apo.preconditioners import DiagonalBlock
        >>> block = DiagonalBlock((2,))
        >>> _ = block.factors["s"].copy_(torch.tensor([1.0, 2.0]))
        >>> block.apply(torch.tensor([1.0, 1.0]))
        tensor([1., 4.])
    """

    stackable: ClassVar[bool] = False

    def __init__(self, shape: Sequence[int], factors: Mapping[str, Tensor], *, matmul: str = "float32") -> None:
        check_matmul(matmul)
        self.shape = tuple(shape)
        self.factors = dict(factors)
        self.matmul = matmul
        self.lead = 0

    @classmethod
    @torch.no_grad()
    def stacked(cls, blocks: Sequence[Block]) -> Block:
        """Return one block for gradients ``[blocks, *shape]`` whose factors are those of ``blocks``, stacked.

        Args:
            blocks: Stackable blocks of the same class, shape, factors and precision.

        Example:
            >>> from apo.preconditioners import KroneckerBlock
            >>> Block.stacked([KroneckerBlock(2, 3), KroneckerBlock(2, 3)]).shape
            (2, 2, 3)
        """
        joint = copy.copy(blocks[0])  # with whatever else a subclass keeps
        joint.shape = (len(blocks), *joint.shape)
        joint.factors = {key: torch.stack([block.factors[key] for block in blocks]) for key in joint.factors}
        joint.lead += 1
        return joint

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
        """Return a few numbers for a log, as tensors on the block's device.

        Returns:
            ``mean_eigenvalue``: the trace of P divided by its size, 1 at the start; 0-dimensional, or ``[blocks]``
            for stacked blocks.
        """
        with self._arithmetic():
            return {"mean_eigenvalue": self._trace() / prod(self.shape[self.lead :])}

    def move_factors(self, memory: Mapping[str, Tensor]) -> None:
        """Let the factors lie in other memory, such as slices of a joint tensor, which already holds their values.

        The factors stay the same tensor objects: a meta-optimizer that holds them sees the same numbers as before.
        """
        for key, factor in self.factors.items():
            factor.data = memory[key]  # a new tensor would leave the meta-optimizer with the old one

    def release_factors(self) -> None:
        """Free the memory of the factors and keep their shapes, for a block that another process computes."""
        # The shapes are still needed, to check a checkpoint and to receive the other process's product.
        self.factors = {key: factor.to("meta") for key, factor in self.factors.items()}

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
        if tensor.shape != self.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but this block takes {self.shape}: "
                "pass a tensor that the layer's view has gathered."
            )
        return tensor.to(next(iter(self.factors.values())).dtype)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        # A meta-step may run inside the user's autocast region, which would do these products in 16 bits.
        full_precision = torch.autocast(next(iter(self.factors.values())).device.type, enabled=False)
        return _tf32(full_precision) if self.matmul == "tf32" else full_precision

    def _operand_type(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which gradients and factors of type ``dtype`` enter matrix products."""
        # A scale alone enters no product, so that rounding it would save nothing.
        return torch.bfloat16 if self.matmul == "bfloat16" and len(self.factors) > 1 else dtype


def check_matmul(matmul: str) -> None:
    """Refuse an unknown precision."""
    if matmul not in ("float32", "tf32", "bfloat16"):
        raise ValueError(f"matmul is {matmul!r}: pass 'float32', 'tf32' or 'bfloat16'.")


def factor_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which factors for gradients of type ``dtype`` are kept: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def _tf32(full_precision: AbstractContextManager[Any]) -> Iterator[None]:
    """Let tensor cores round the operands of float32 products, and restore torch's setting afterwards.

    The setting belongs to the process; on devices without TF32 it changes nothing.
    """
    backend: Any = torch.backends.cuda.matmul
    # torch 2.9 replaced the old switch; reading it fails once the new one has been used, so the new one goes first.
    name, value = ("fp32_precision", "tf32") if hasattr(backend, "fp32_precision") else ("allow_tf32", True)
    before = getattr(backend, name)
    setattr(backend, name, value)
    try:
        with full_precision:
            yield
    finally:
        setattr(backend, name, before)
