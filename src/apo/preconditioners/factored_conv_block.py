"""A preconditioner for convolutions with separate factors for input channels and kernel positions."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from apo.preconditioners.block import Block, dense, factor_type

__all__ = ["FactoredConvBlock", "along", "contracted"]

# The factors in the order in which they are applied, with the dimension of the gradient that each acts on. The kernel's
# comes first because its product reads a transposed gradient at no cost.
_MODES = {"A_kernel": -2, "A_in": -1, "B": -3}


@final
class FactoredConvBlock(Block):
    r"""A Kronecker block whose input side is split again, for gradients ``[out, k, in]``.

    The matrix view of a 3x3 convolution with 512 input channels has a factor A of 4608 x 4608. Here A is
    :math:`A_{kernel} \otimes A_{in}`, 9 x 9 and 512 x 512:

    .. math::
        P = U\, \mathrm{diag}(\mathrm{vec}\, S)^2\, U^\top, \qquad U = B \otimes A_{kernel} \otimes A_{in}

    with the gradient flattened row by row. Channels come last so that each of the two large factors takes one matrix
    product, of ``[out, k * in]`` and ``[out * k, in]``. Write :math:`X \times_j U_j` for the product along dimension j.
    With gradient :math:`g_W`, cotangent h, :math:`M = g_W \times_j U_j^\top` and
    :math:`\partial N = h \times_j U_j^\top` (over all j), :math:`N = S^2 \odot M` and
    :math:`\partial M = S^2 \odot \partial N`, the pull-back is

    .. math::
        \partial S &= 2\, S \odot M \odot \partial N, \\
        \partial U_j &= (h \times_{i < j} U_i^\top)_{(j)} (N \times_{i > j} U_i)_{(j)}^\top
            + (g_W \times_{i < j} U_i^\top)_{(j)} (\partial M \times_{i > j} U_i)_{(j)}^\top

    where :math:`X_{(j)}` is X unfolded along dimension j. The order of the factors does not matter. A side without a
    dense factor has the identity, as in :class:`KroneckerBlock`.

    Args:
        out_channels: Size of B.
        in_channels: Size of A_in (input channels of one group).
        kernel: Size of A_kernel, the number of positions in the kernel.
        dense_out: Whether there is a factor B.
        dense_in: Whether there is a factor A_in.
        dense_kernel: Whether there is a factor A_kernel.
        matmul: Precision of products with the factors: ``"float32"``, ``"tf32"`` or ``"bfloat16"``.
        dtype: Type of the gradient; the factors are at least float32.
        device: Where the factors live.

    Example:
        >>> block = FactoredConvBlock(8, 4, 9)
        >>> sorted((name, tuple(factor.shape)) for name, factor in block.factors.items())
        [('A_in', (4, 4)), ('A_kernel', (9, 9)), ('B', (8, 8)), ('S', (8, 9, 4))]
    """

    stackable: ClassVar[bool] = True

    def __init__(
        self,
        out_channels: int,
        in_channels: int,
        kernel: int,
        dense_out: bool = True,
        dense_in: bool = True,
        dense_kernel: bool = True,
        *,
        matmul: str = "float32",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        shape = (out_channels, kernel, in_channels)
        dtype = factor_type(dtype)
        sides = {"B": (out_channels, dense_out), "A_in": (in_channels, dense_in), "A_kernel": (kernel, dense_kernel)}
        factors = {name: torch.eye(n, dtype=dtype, device=device) for name, (n, dense) in sides.items() if dense}
        factors["S"] = torch.ones(shape, dtype=dtype, device=device)
        super().__init__(shape, factors, matmul=matmul)

    def to_dense(self) -> Tensor:
        """Return P for gradients flattened row by row."""
        sides = {dim: self.factors[name] for name, dim in _MODES.items() if name in self.factors}
        return dense(self.factors["S"].square(), sides, dims=3)

    def _apply(self, gradient: Tensor) -> Tensor:
        s, narrow, modes = self._operands()
        projected = _projections(gradient.to(narrow), modes)[-1]
        tensor = (s.square() * projected).to(narrow)
        for _, matrix, mode in reversed(modes):
            tensor = along(tensor, matrix, mode)
        return tensor.to(s.dtype)

    def _pull_back(self, gradient: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        s, narrow, modes = self._operands()
        square = s.square()
        *gradients, m = _projections(gradient.to(narrow), modes)
        *cotangents, d_n = _projections(cotangent.to(narrow), modes)
        n, d_m = (square * m).to(narrow), (square * d_n).to(narrow)
        found = {"S": 2.0 * s * m * d_n}
        # Backwards through the factors: g and h are multiplied by those before U_j, n and d_m by those after it.
        for (name, matrix, mode), g, h in reversed(list(zip(modes, gradients, cotangents, strict=True))):
            found[name] = contracted(h, n, mode).to(s.dtype) + contracted(g, d_m, mode).to(s.dtype)
            n, d_m = along(n, matrix, mode), along(d_m, matrix, mode)
        return {name: found[name] for name in self.factors}

    def _trace(self) -> Tensor:
        lengths = self.factors["S"]
        for name, mode in _MODES.items():
            if name in self.factors:
                columns = torch.linalg.vector_norm(self.factors[name], dim=-2)
                lengths = lengths * columns[(..., *(slice(None) if dim == mode else None for dim in (-3, -2, -1)))]
        return lengths.flatten(self.lead).square().sum(-1)

    def _operands(self) -> tuple[Tensor, torch.dtype, list[tuple[str, Tensor, int]]]:
        """Return S, the type of the operands of products, and name, matrix and dimension of the other factors."""
        s = self.factors["S"]
        narrow = self._operand_type()
        names = [name for name in _MODES if name in self.factors]
        return s, narrow, [(name, self.factors[name].to(narrow), _MODES[name]) for name in names]


def _projections(tensor: Tensor, modes: list[tuple[str, Tensor, int]]) -> list[Tensor]:
    """Multiply by one factor of U^T after another; return the tensor before the first and after each."""
    steps = [tensor]
    for _, matrix, mode in modes:
        steps.append(along(steps[-1], matrix.mT, mode))
    return steps


def along(tensor: Tensor, matrix: Tensor, mode: int, dims: int = 3) -> Tensor:
    """Multiply a tensor by a matrix along one of its last two or three dimensions, such as ``[..., out, k, in]``."""
    if mode == -dims:
        return (matrix @ tensor.flatten(1 - dims)).reshape(tensor.shape)
    if mode == -1:
        return (tensor.flatten(-dims, -2) @ matrix.mT).reshape(tensor.shape)
    return matrix.unsqueeze(-3) @ tensor


def contracted(left: Tensor, right: Tensor, mode: int, dims: int = 3) -> Tensor:
    """Return the matrix of inner products of the slices of two tensors along one of their last ``dims`` dimensions."""
    if mode == -dims:
        return left.flatten(1 - dims) @ right.flatten(1 - dims).mT
    if mode == -1:
        return left.flatten(-dims, -2).mT @ right.flatten(-dims, -2)
    return (left @ right.mT).sum(-3)
