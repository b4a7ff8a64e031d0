"""A preconditioner for convolutions whose input channels and kernel positions have factors of their own."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from .block import Block, factor_type

__all__ = ["FactoredConvBlock"]

# The factors, and the mode (dimension of the gradient) that each acts on.
_MODES = {"B": 0, "A_in": 1, "A_kernel": 2}


@final
class FactoredConvBlock(Block):
    r"""EKFAC's shape with the input side split once more, for gradients ``[out, in, k]``.

    The matrix view of a 3x3 convolution with 512 input channels has a factor A of 4608 x 4608. Here A is
    :math:`A_{in} \otimes A_{kernel}`, 512 x 512 and 9 x 9:

    .. math::
        P = U\, \mathrm{diag}(\mathrm{vec}\, S)^2\, U^\top, \qquad U = B \otimes A_{in} \otimes A_{kernel}

    with the gradient flattened row by row. Write :math:`G \times_j U_j` for the product along dimension j.
    With cotangent C of the result, :math:`M = G \times_j U_j^\top` and
    :math:`\partial N = C \times_j U_j^\top` (over all j), :math:`N = S^2 \odot M` and
    :math:`\partial M = S^2 \odot \partial N`, the pull-back is

    .. math::
        \partial S &= 2\, S \odot M \odot \partial N, \\
        \partial U_j &= C_{(j)} (N \times_{i \ne j} U_i)_{(j)}^\top
            + G_{(j)} (\partial M \times_{i \ne j} U_i)_{(j)}^\top

    where :math:`X_{(j)}` is X unfolded along dimension j. A side without a dense factor has the identity, as
    in :class:`KroneckerBlock`.

    Args:
        out_channels: Size of B.
        in_channels: Size of A_in (input channels of one group).
        kernel: Size of A_kernel, the number of positions in the kernel.
        dense_out: Whether there is a factor B.
        dense_in: Whether there is a factor A_in.
        dense_kernel: Whether there is a factor A_kernel.
        dtype: Type of the gradient; the factors are kept in float32 at least.
        device: Where the factors live.

    Example:
        >>> block = FactoredConvBlock(8, 4, 9)
        >>> sorted((name, tuple(factor.shape)) for name, factor in block.factors.items())
        [('A_in', (4, 4)), ('A_kernel', (9, 9)), ('B', (8, 8)), ('S', (8, 4, 9))]
    """

    def __init__(
        self,
        out_channels: int,
        in_channels: int,
        kernel: int,
        dense_out: bool = True,
        dense_in: bool = True,
        dense_kernel: bool = True,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        shape = (out_channels, in_channels, kernel)
        dtype = factor_type(dtype)
        dense = dict(zip(_MODES, (dense_out, dense_in, dense_kernel), strict=True))
        factors = {
            name: torch.eye(shape[mode], dtype=dtype, device=device) for name, mode in _MODES.items() if dense[name]
        }
        factors["S"] = torch.ones(shape, dtype=dtype, device=device)
        super().__init__(shape, factors)

    def to_dense(self) -> Tensor:
        """Return P for gradients flattened row by row."""
        scale = self.factors["S"].reshape(-1).square()
        basis = torch.ones(1, 1, dtype=scale.dtype, device=scale.device)
        for name, mode in _MODES.items():
            identity = torch.eye(self.shape[mode], dtype=scale.dtype, device=scale.device)
            basis = torch.kron(basis, self.factors.get(name, identity))
        return basis @ torch.diag(scale) @ basis.mT

    def _apply(self, gradient: Tensor) -> Tensor:
        return self._expand(self.factors["S"].square() * self._project(gradient))

    def _pull_back(self, gradient: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        s = self.factors["S"]
        m, d_n = self._project(gradient), self._project(cotangent)
        n, d_m = s.square() * m, s.square() * d_n
        result = {}
        for name, mode in _MODES.items():
            if name in self.factors:
                result[name] = _unfold(cotangent, mode) @ _unfold(self._expand(n, but=name), mode).mT
                result[name] += _unfold(gradient, mode) @ _unfold(self._expand(d_m, but=name), mode).mT
        result["S"] = 2.0 * s * m * d_n
        return result

    def _trace(self) -> Tensor:
        weights = self.factors["S"].square()
        for name, mode in _MODES.items():
            if name in self.factors:
                lengths = self.factors[name].square().sum(0)
                weights = weights * lengths.reshape([-1 if dim == mode else 1 for dim in range(3)])
        return weights.sum()

    def _project(self, tensor: Tensor) -> Tensor:
        """Multiply by U^T."""
        for name, mode in _MODES.items():
            if name in self.factors:
                tensor = _along(tensor, self.factors[name].mT, mode)
        return tensor

    def _expand(self, tensor: Tensor, but: str | None = None) -> Tensor:
        """Multiply by U, or by all of it but one factor."""
        for name, mode in _MODES.items():
            if name in self.factors and name != but:
                tensor = _along(tensor, self.factors[name], mode)
        return tensor


def _along(tensor: Tensor, matrix: Tensor, mode: int) -> Tensor:
    """Multiply a tensor ``[out, in, k]`` by a matrix along one of its dimensions."""
    if mode == 0:
        return (matrix @ tensor.flatten(1)).reshape(tensor.shape)
    return matrix @ tensor if mode == 1 else tensor @ matrix.mT


def _unfold(tensor: Tensor, mode: int) -> Tensor:
    """Return the matrix whose rows are indexed by one dimension and whose columns by the others."""
    return tensor.movedim(mode, 0).flatten(1)
