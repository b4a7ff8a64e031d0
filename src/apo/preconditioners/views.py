"""How the parameters of one layer become the tensor that a block takes, and back.

A view depends on shapes only. ``gather`` and ``scatter`` are exact inverses that rearrange numbers without changing
them. They take gradients, cotangents, or anything else of the parameters' shapes. All tensors may have the same leading
dimensions in addition, to gather or scatter many layers at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import final

import torch
from torch import Tensor

__all__ = ["View", "ReshapeView", "MatrixView", "ChannelsLastView", "TransposedConvView", "ConcatenatedView"]


class View(ABC):
    """A bijection between tensors shaped like a layer's parameters and one tensor.

    Attributes:
        parts: Shapes of the layer's parameters.
        shape: Shape of the gathered tensor.

    Example:
        >>> view = MatrixView((2, 3), bias=True)
        >>> weight, bias = torch.zeros(2, 3), torch.ones(2)
        >>> view.gather([weight, bias])
        tensor([[0., 0., 0., 1.],
                [0., 0., 0., 1.]])
        >>> [tuple(part.shape) for part in view.scatter(view.gather([weight, bias]))]
        [(2, 3), (2,)]
    """

    def __init__(self, parts: Sequence[Sequence[int]], shape: Sequence[int]) -> None:
        self.parts = [tuple(part) for part in parts]
        self.shape = tuple(shape)

    @property
    def key(self) -> tuple:
        """Identifies the view: views with equal keys gather and scatter in the same way."""
        return (type(self), *self.parts, self.shape)

    def gather(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Join one tensor per parameter into one.

        Args:
            tensors: In the order of the parameters. None (a missing gradient) counts as zeros; at least one must be a
                tensor.

        Returns:
            A tensor of shape ``self.shape``; it may share memory with its sources.

        Raises:
            ValueError: If all are ``None``.
        """
        pairs = list(zip(tensors, self.parts, strict=True))
        like, shape = next(((tensor, part) for tensor, part in pairs if tensor is not None), (None, ()))
        if like is None:
            raise ValueError("tensors must have at least one tensor, got only None: leave the layer out")
        lead = tuple(like.shape[: like.ndim - len(shape)])
        return self._gather([like.new_zeros((*lead, *part)) if t is None else t for t, part in pairs], lead)

    @abstractmethod
    def scatter(self, gathered: Tensor) -> list[Tensor]:
        """Split a gathered tensor into one tensor per parameter; they may share its memory."""

    @abstractmethod
    def _gather(self, tensors: list[Tensor], lead: tuple[int, ...]) -> Tensor: ...

    def _lead(self, gathered: Tensor) -> tuple[int, ...]:
        return tuple(gathered.shape[: gathered.ndim - len(self.shape)])


@final
class ReshapeView(View):
    """One parameter in another shape.

    Args:
        part: Shape of the parameter.
        shape: Shape that the block takes; by default the parameter's own.

    Example:
        >>> ReshapeView((2, 3, 4), (2, 12)).gather([torch.zeros(2, 3, 4)]).shape
        torch.Size([2, 12])
    """

    def __init__(self, part: Sequence[int], shape: Sequence[int] | None = None) -> None:
        super().__init__([part], part if shape is None else shape)

    def scatter(self, gathered: Tensor) -> list[Tensor]:
        """Restore the shape of the parameter."""
        return [gathered.reshape((*self._lead(gathered), *self.parts[0]))]

    def _gather(self, tensors: list[Tensor], lead: tuple[int, ...]) -> Tensor:
        return tensors[0].reshape((*lead, *self.shape))


@final
class MatrixView(View):
    """A weight as a matrix with one row per output, and its bias as one more column.

    Args:
        weight: Shape of the weight, outputs first; the other dimensions are flattened.
        bias: Whether the layer has a bias, one number per output.
        stack: If given, the rows form this many matrices, gathered as ``[stack, rows, cols]``.

    Example:
        >>> MatrixView((8, 3, 3, 3), bias=True).shape
        (8, 28)
        >>> MatrixView((12, 4), bias=True, stack=3).shape  # attention's packed query, key and value
        (3, 4, 5)
    """

    def __init__(self, weight: Sequence[int], *, bias: bool = False, stack: int | None = None) -> None:
        self._matrix = (weight[0], prod(weight[1:]))
        rows, cols = weight[0], self._matrix[1] + bias
        if stack is not None and rows % stack:
            raise ValueError(f"stack must divide the {rows} rows, got {stack}")
        shape = (rows, cols) if stack is None else (stack, rows // stack, cols)
        super().__init__([weight, (rows,)] if bias else [weight], shape)

    def scatter(self, gathered: Tensor) -> list[Tensor]:
        """Split off the bias and restore the shape of the weight."""
        lead, (rows, cols) = self._lead(gathered), self._matrix
        if len(self.parts) == 1:
            return [gathered.reshape((*lead, *self.parts[0]))]
        matrix = gathered.reshape((*lead, rows, cols + 1))  # undoes a stack as well
        return [matrix[..., :cols].reshape((*lead, *self.parts[0])), matrix[..., cols]]

    def _gather(self, tensors: list[Tensor], lead: tuple[int, ...]) -> Tensor:
        matrix = tensors[0].reshape((*lead, *self._matrix))
        if len(tensors) == 2:
            matrix = torch.cat([matrix, tensors[1].unsqueeze(-1)], dim=-1)
        return matrix.reshape((*lead, *self.shape))


@final
class ChannelsLastView(View):
    """A convolution's weight ``[out, in, *k]`` as ``[out, k, in]``, the kernel's positions in one dimension.

    A weight in torch's memory format ``channels_last`` already has this layout, so nothing is copied.

    Args:
        weight: Shape of the weight.

    Example:
        >>> ChannelsLastView((8, 3, 5, 5)).shape
        (8, 25, 3)
    """

    def __init__(self, weight: Sequence[int]) -> None:
        outputs, inputs, *kernel = weight
        super().__init__([weight], (outputs, prod(kernel), inputs))

    def scatter(self, gathered: Tensor) -> list[Tensor]:
        """Restore the order of dimensions and the shape of the weight."""
        return [gathered.mT.reshape((*self._lead(gathered), *self.parts[0]))]

    def _gather(self, tensors: list[Tensor], lead: tuple[int, ...]) -> Tensor:
        return tensors[0].flatten(len(lead) + 2).mT


@final
class TransposedConvView(View):
    """A transposed convolution's weight ``[in, out/groups, *k]``, transposed to ``[out, in/groups, *k]``.

    Args:
        weight: Shape of the weight as the layer stores it.
        groups: The layer's groups.
        inner: The view of the transposed weight (and of the bias, if it takes one).

    Example:
        >>> inner = MatrixView((6, 4, 3, 3), bias=True)
        >>> TransposedConvView((4, 6, 3, 3), groups=1, inner=inner).shape
        (6, 37)
    """

    def __init__(self, weight: Sequence[int], groups: int, inner: View) -> None:
        # Inputs and outputs of a group are contiguous, so each group is transposed separately.
        self._grouped = (groups, weight[0] // groups, *weight[1:])
        self._inner = inner
        super().__init__([weight, *inner.parts[1:]], inner.shape)

    @property
    def key(self) -> tuple:
        """Identifies the view, including the groups and the inner view."""
        return (*super().key, self._grouped, self._inner.key)

    def scatter(self, gathered: Tensor) -> list[Tensor]:
        """Scatter the inner view and transpose the weight back."""
        lead = self._lead(gathered)
        transposed, *bias = self._inner.scatter(gathered)
        groups, inputs, outputs, *kernel = self._grouped
        weight = transposed.reshape((*lead, groups, outputs, inputs, *kernel)).transpose(len(lead) + 1, len(lead) + 2)
        return [weight.reshape((*lead, *self.parts[0])), *bias]

    def _gather(self, tensors: list[Tensor], lead: tuple[int, ...]) -> Tensor:
        weight, *bias = tensors
        transposed = weight.reshape((*lead, *self._grouped)).transpose(len(lead) + 1, len(lead) + 2)
        return self._inner.gather([transposed.reshape((*lead, *self._inner.parts[0])), *bias])


@final
class ConcatenatedView(View):
    """Any number of parameters as one long vector.

    Args:
        parts: Shapes of the parameters.

    Example:
        >>> ConcatenatedView([(2, 3), (), (4,)]).shape
        (11,)
    """

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self._sizes = [prod(part) for part in parts]
        super().__init__(parts, (sum(self._sizes),))

    def scatter(self, gathered: Tensor) -> list[Tensor]:
        """Split the vector and restore the shape of each parameter."""
        lead, pieces = self._lead(gathered), gathered.split(self._sizes, dim=-1)
        return [piece.reshape((*lead, *part)) for piece, part in zip(pieces, self.parts, strict=True)]

    def _gather(self, tensors: list[Tensor], lead: tuple[int, ...]) -> Tensor:
        return torch.cat([tensor.reshape((*lead, size)) for tensor, size in zip(tensors, self._sizes, strict=True)], -1)
