"""The part of a preconditioner that belongs to one layer: a learned positive semi-definite matrix.

A block stores its matrix P as a few small factors and never builds it. It computes two things, with matrix products
alone: P g for a gradient g, and the gradient of an inner product with P g with respect to each factor. The second is
all that learning needs, so autograd records nothing. :class:`KroneckerBlock` is the paper's, with EKFAC's structure.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any, ClassVar, final

import torch
from torch import Tensor

__all__ = ["Block", "KroneckerBlock", "check_matmul", "dense", "factor_type"]


class Block(ABC):
    r"""A learned positive semi-definite matrix :math:`P` that acts on gradients of one shape.

    Every block starts as the identity. Arithmetic happens in the factors' type, at least float32: 16-bit gradients are
    converted, and autocast is disabled. Only the operands of matrix products may be narrower, see ``matmul``.

    Args:
        shape: Shape of the gradients that the block takes.
        factors: The learned tensors by name, leaves that do not require gradients, in a fixed order.
        matmul: Precision of products with factors: ``"float32"``, ``"tf32"`` or ``"bfloat16"``.
        statistics: What the block keeps beside them, by other names: not learned, but gathered by :meth:`observe`.

    Attributes:
        lead: The number of leading batch dimensions: 1 for :meth:`stacked` blocks, otherwise 0.
        stackable: Whether the arithmetic also works with a leading batch dimension, as :meth:`stacked` needs.

    Example:
        >>> from apo.preconditioners import DiagonalBlock
        >>> block = DiagonalBlock((2,))
        >>> _ = block.factors["s"].copy_(torch.tensor([1.0, 2.0]))
        >>> block.apply(torch.tensor([1.0, 1.0]))
        tensor([1., 4.])
    """

    stackable: ClassVar[bool] = False

    def __init__(
        self,
        shape: Sequence[int],
        factors: Mapping[str, Tensor],
        *,
        matmul: str = "float32",
        statistics: Mapping[str, Tensor] | None = None,
    ) -> None:
        check_matmul(matmul)
        self.shape = tuple(shape)
        self.factors = dict(factors)
        self.statistics = dict(statistics or {})
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
        joint = copy.copy(blocks[0])  # including the attributes of a subclass
        joint.shape = (len(blocks), *joint.shape)
        joint.factors = {key: torch.stack([block.factors[key] for block in blocks]) for key in joint.factors}
        joint.statistics = {key: torch.stack([block.statistics[key] for block in blocks]) for key in joint.statistics}
        joint.lead += 1
        return joint

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The factors and the statistics: all that a checkpoint needs."""
        return {**self.factors, **self.statistics}

    def apply(self, gradient: Tensor) -> Tensor:
        """Return P g as a tensor of the same shape, in the factors' type.

        Args:
            gradient: g, of shape ``self.shape`` and any floating-point type.

        Raises:
            ValueError: If the shape is wrong.
        """
        with self._arithmetic():
            return self._apply(self._read("gradient", gradient))

    def pull_back(self, gradient: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        r"""Return the gradient of :math:`\langle h, P g \rangle` with respect to each entry of ``self.factors``.

        Args:
            gradient: g, as given to :meth:`apply`.
            cotangent: h, of the same shape.
        """
        with self._arithmetic():
            return self._pull_back(self._read("gradient", gradient), self._read("cotangent", cotangent))

    def observe(self, gradient: Tensor, sampled: bool = False) -> None:
        """Take a gradient into the statistics; a block without statistics has nothing to do.

        Args:
            gradient: g of a training step, as given to :meth:`apply`, whose result has already been used for this step.
            sampled: Whether it is not g, but the gradient of the loss at targets drawn from the network's own outputs.
        """

    def constrain(self) -> None:
        """Bring factors that a meta-optimizer has moved too far back into their range, if they have one."""

    def summary(self) -> dict[str, Tensor]:
        """Return values to log: ``mean_eigenvalue`` is the trace of P divided by its size, 1 at the start.

        It is a tensor on the block's device, 0-dimensional, or ``[blocks]`` for stacked blocks.
        """
        with self._arithmetic():
            return {"mean_eigenvalue": self._trace() / prod(self.shape[self.lead :])}

    def move_factors(self, memory: Mapping[str, Tensor]) -> None:
        """Move all tensors to other memory, such as slices of a joint tensor, which already holds their values."""
        for key, tensor in self.tensors.items():
            tensor.data = memory[key]  # the same tensor object, because a meta-optimizer holds it

    def release_factors(self) -> None:
        """Free the memory of all tensors and keep their shapes, for a block that another process computes."""
        # The shapes are still needed, to check a checkpoint and to receive the other process's product.
        self.factors = {key: factor.to("meta") for key, factor in self.factors.items()}
        self.statistics = {key: tensor.to("meta") for key, tensor in self.statistics.items()}

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Return P as a matrix ``[n, n]`` that acts on ``gradient.reshape(-1)``; only for small blocks."""

    @abstractmethod
    def _apply(self, gradient: Tensor) -> Tensor: ...

    @abstractmethod
    def _pull_back(self, gradient: Tensor, cotangent: Tensor) -> dict[str, Tensor]: ...

    @abstractmethod
    def _trace(self) -> Tensor: ...

    def _read(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.shape != self.shape:
            raise ValueError(
                f"{name} must have the block's shape {self.shape}, got {tuple(tensor.shape)}: "
                "pass a tensor that the layer's view has gathered"
            )
        return tensor.to(next(iter(self.factors.values())).dtype)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        # A meta-step may run inside the user's autocast region, which would compute these products in 16 bits.
        full_precision = torch.autocast(next(iter(self.factors.values())).device.type, enabled=False)
        return _tf32(full_precision) if self.matmul == "tf32" else full_precision

    def _operand_type(self) -> torch.dtype:
        """Return the type in which gradients and factors enter matrix products."""
        # Without a dense factor there is no matrix product that 16 bits would speed up.
        narrow = self.matmul == "bfloat16" and len(self.factors) > 1
        return torch.bfloat16 if narrow else next(iter(self.factors.values())).dtype


@final
class KroneckerBlock(Block):
    r"""The paper's structured preconditioner :math:`P_S`, for gradients ``[rows, cols]``.

    .. math::
        P_S = (A \otimes B)\, \mathrm{diag}(\mathrm{vec}\, S)^2\, (A \otimes B)^\top, \qquad
        P_S\, \mathrm{vec}(g_W) = \mathrm{vec}(B (S^2 \odot B^\top g_W A) A^\top)

    where vec stacks columns. With cotangent h, :math:`M = B^\top g_W A` and :math:`N = S^2 \odot M`, the pull-back is

    .. math::
        \partial N &= B^\top h A, \quad \partial S = 2\, S \odot M \odot \partial N, \quad
            \partial M = S^2 \odot \partial N, \\
        \partial B &= h A N^\top + g_W A\, \partial M^\top, \quad
            \partial A = h^\top B N + g_W^\top B\, \partial M.

    A side that is too long for a dense factor has the identity. A diagonal factor would add nothing, because S already
    scales every element.

    Args:
        rows: Number of rows of the gradient (a layer's outputs), the size of B.
        cols: Number of columns of the gradient (a layer's inputs, and one for the bias), the size of A.
        dense_rows: Whether there is a factor B.
        dense_cols: Whether there is a factor A.
        stack: If given, the gradient is ``[stack, rows, cols]``, and each matrix has its own factors (the three
            projections of attention, the gates of a recurrent layer).
        matmul: Precision of products with the factors: ``"float32"``, ``"tf32"`` or ``"bfloat16"``.
        dtype: Type of the gradient; the factors are at least float32.
        device: Where the factors live.

    Example:
        >>> block = KroneckerBlock(3, 5)
        >>> {name: tuple(factor.shape) for name, factor in block.factors.items()}
        {'A': (5, 5), 'B': (3, 3), 'S': (3, 5)}
        >>> gradient = torch.randn(3, 5)
        >>> bool((block.apply(gradient) == gradient).all())  # starts as the identity
        True
    """

    stackable: ClassVar[bool] = True

    def __init__(
        self,
        rows: int,
        cols: int,
        dense_rows: bool = True,
        dense_cols: bool = True,
        *,
        stack: int | None = None,
        matmul: str = "float32",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        lead = () if stack is None else (stack,)
        dtype = factor_type(dtype)
        factors = {}
        # repeat() rather than expand(): the matrices of a stack learn separately.
        if dense_cols:
            factors["A"] = torch.eye(cols, dtype=dtype, device=device).repeat(*lead, 1, 1)
        if dense_rows:
            factors["B"] = torch.eye(rows, dtype=dtype, device=device).repeat(*lead, 1, 1)
        factors["S"] = torch.ones(*lead, rows, cols, dtype=dtype, device=device)
        super().__init__((*lead, rows, cols), factors, matmul=matmul)

    def to_dense(self) -> Tensor:
        """Return P for gradients flattened row by row."""
        sides = {dim: self.factors[name] for name, dim in (("B", -2), ("A", -1)) if name in self.factors}
        return dense(self.factors["S"].square(), sides, dims=2)

    def _apply(self, gradient: Tensor) -> Tensor:
        s, a, b, gradient = self._operands(gradient)
        m = gradient if b is None else b.mT @ gradient
        m = m if a is None else m @ a
        # S is never rounded: it is in no matrix product, so rounding would save no time.
        n = (s.square() * m).to(m.dtype)
        n = n if b is None else b @ n
        return (n if a is None else n @ a.mT).to(s.dtype)

    def _pull_back(self, gradient: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        s, a, b, gradient, cotangent = self._operands(gradient, cotangent)
        # Both products with A are needed twice: for M and dN, and for dB.
        gradient_a, cotangent_a = (gradient, cotangent) if a is None else (gradient @ a, cotangent @ a)
        m, d_n = (gradient_a, cotangent_a) if b is None else (b.mT @ gradient_a, b.mT @ cotangent_a)
        square = s.square()
        n, d_m = (square * m).to(m.dtype), (square * d_n).to(m.dtype)
        result = {}  # in the order of self.factors
        if a is not None:
            b_n, b_d_m = (n, d_m) if b is None else (b @ n, b @ d_m)
            result["A"] = (cotangent.mT @ b_n).to(s.dtype) + (gradient.mT @ b_d_m).to(s.dtype)
        if b is not None:
            result["B"] = (cotangent_a @ n.mT).to(s.dtype) + (gradient_a @ d_m.mT).to(s.dtype)
        result["S"] = 2.0 * s * m * d_n
        return result

    def _trace(self) -> Tensor:
        # tr(U diag(s)^2 U^T) = sum_i s_i^2 |u_i|^2, and the columns of a Kronecker product are products of columns.
        lengths = self.factors["S"]
        if "A" in self.factors:
            lengths = lengths * torch.linalg.vector_norm(self.factors["A"], dim=-2).unsqueeze(-2)
        if "B" in self.factors:
            lengths = lengths * torch.linalg.vector_norm(self.factors["B"], dim=-2).unsqueeze(-1)
        return lengths.flatten(self.lead).square().sum(-1)

    def _operands(self, *tensors: Tensor) -> list[Any]:
        """Return S; then A, B (None for an identity) and ``tensors``, in the type of the operands of products."""
        s, narrow = self.factors["S"], self._operand_type()
        operands = (self.factors.get("A"), self.factors.get("B"), *tensors)
        return [s, *[None if operand is None else operand.to(narrow) for operand in operands]]


def check_matmul(matmul: str) -> None:
    """Raise a ``ValueError`` for an unknown precision."""
    if matmul not in ("float32", "tf32", "bfloat16"):
        raise ValueError(f"matmul must be 'float32', 'tf32' or 'bfloat16', got {matmul!r}")


def factor_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the factors for gradients of type ``dtype``: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def dense(eigenvalues: Tensor, sides: Mapping[int, Tensor], dims: int) -> Tensor:
    """Return U diag(d) U^T, where U is the Kronecker product of one matrix for each dimension of the gradient.

    Args:
        eigenvalues: d, ``[*stack, *shape]`` with ``dims`` dimensions in ``shape``; those of a stack make up the blocks
            of a block-diagonal matrix.
        sides: The matrices ``[*stack, n, n]`` by dimension, counted from the last one, which is -1. A dimension without
            a matrix has the identity.
        dims: The number of dimensions of the gradient.
    """
    stack, shape = eigenvalues.shape[: eigenvalues.ndim - dims], eigenvalues.shape[eigenvalues.ndim - dims :]
    parts = []
    for index, values in enumerate(eigenvalues.reshape(prod(stack), prod(shape))):
        u = values.new_ones(1, 1)
        for dim, size in zip(range(-dims, 0), shape, strict=True):
            one = sides[dim].reshape(-1, size, size)[index] if dim in sides else torch.eye(size).to(values)
            u = torch.kron(u, one.contiguous())
        parts.append(u @ torch.diag(values) @ u.mT)
    return torch.block_diag(*parts)


@contextmanager
def _tf32(full_precision: AbstractContextManager[Any]) -> Iterator[None]:
    """Allow TF32 for float32 products, and restore torch's process-wide setting afterwards."""
    backend: Any = torch.backends.cuda.matmul
    # torch 2.9 replaced the old switch, and reading the old one fails once the new one has been used.
    name, value = ("fp32_precision", "tf32") if hasattr(backend, "fp32_precision") else ("allow_tf32", True)
    before = getattr(backend, name)
    setattr(backend, name, value)
    try:
        with full_precision:
            yield
    finally:
        setattr(backend, name, before)
