"""The paper's structured preconditioner for the gradient of a weight matrix, with the structure of EKFAC."""

from __future__ import annotations

from functools import reduce
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from apo.preconditioners.block import Block, factor_type

__all__ = ["KroneckerBlock"]


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
        """Return P for gradients flattened row by row, hence B before A in the Kronecker product."""
        rows, cols = self.shape[-2:]
        scale = self.factors["S"].reshape(-1, rows * cols).square()
        options = {"dtype": scale.dtype, "device": scale.device}
        a = self.factors.get("A", torch.eye(cols, **options)).expand(len(scale), cols, cols)
        b = self.factors.get("B", torch.eye(rows, **options)).expand(len(scale), rows, rows)
        bases = [torch.kron(b_i.contiguous(), a_i.contiguous()) for a_i, b_i in zip(a, b, strict=True)]
        return torch.block_diag(*(basis @ torch.diag(d) @ basis.mT for basis, d in zip(bases, scale, strict=True)))

    def _apply(self, gradient: Tensor) -> Tensor:
        s, a, b, gradient = self._operands(gradient)
        projected = _product(_transposed(b), gradient, a)
        # S is never rounded: it is in no matrix product, so rounding would save no time.
        scaled = (s.square() * projected).to(projected.dtype)
        return _product(b, scaled, _transposed(a)).to(s.dtype)

    def _pull_back(self, gradient: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        s, a, b, gradient, cotangent = self._operands(gradient, cotangent)
        square = s.square()
        # Both products with A are needed twice: for M and dN, and for dB.
        gradient_a, cotangent_a = _product(gradient, a), _product(cotangent, a)
        m, d_n = _product(_transposed(b), gradient_a), _product(_transposed(b), cotangent_a)
        n, d_m = (square * m).to(m.dtype), (square * d_n).to(m.dtype)
        result = {}  # in the order of self.factors
        if a is not None:
            result["A"] = (cotangent.mT @ _product(b, n)).to(s.dtype) + (gradient.mT @ _product(b, d_m)).to(s.dtype)
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
        s = self.factors["S"]
        narrow = self._operand_type(s.dtype)
        operands = (self.factors.get("A"), self.factors.get("B"), *tensors)
        return [s, *[None if operand is None else operand.to(narrow) for operand in operands]]


def _transposed(factor: Tensor | None) -> Tensor | None:
    return None if factor is None else factor.mT


def _product(*matrices: Tensor | None) -> Tensor:
    """Multiply matrices from left to right; None is the identity."""
    return reduce(torch.matmul, [matrix for matrix in matrices if matrix is not None])
