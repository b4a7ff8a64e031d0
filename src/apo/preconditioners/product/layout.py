"""Strides: how the numbers of a tensor are laid out in memory.

torch's ``foreach`` operations take one launch for a whole list of tensors, but only if paired tensors have the same
strides; a single pair with different strides costs one launch per tensor. Directions therefore get the strides of their
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["laid_out_like", "stacked"]


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape like ``torch.stack``, but in one launch for any order of dimensions.

    Example:
        >>> image = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        >>> stacked([image, image]).shape
        torch.Size([2, 2, 3, 4, 4])
    """
    order = _memory_order(tensors[0].shape, tensors[0].stride())
    if order is None or order == tuple(range(len(order))):
        return torch.stack(list(tensors))
    together = torch.stack([tensor.permute(order) for tensor in tensors])
    return together.permute(0, *[1 + order.index(dim) for dim in range(len(order))])


def laid_out_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """Return a tensor whose last dimensions have the strides of ``pattern``; a copy only if needed.

    Args:
        tensor: Of the shape of ``pattern``, or with additional leading dimensions.
        pattern: The tensor with the strides to copy. If it has gaps or overlaps, the result is contiguous.

    Example:
        >>> image = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        >>> laid_out_like(torch.zeros(5, 2, 3, 4, 4), image)[0].stride() == image.stride()
        True
    """
    lead, stride = tensor.ndim - pattern.ndim, pattern.stride()
    if tensor.stride()[lead:] == stride:
        return tensor
    order = _memory_order(pattern.shape, stride)
    if order is None:
        return tensor.contiguous()
    inner = tensor.permute(*range(lead), *[lead + dim for dim in order]).contiguous()
    return inner.as_strided(tensor.shape, (*inner.stride()[:lead], *stride), inner.storage_offset())


@lru_cache(maxsize=4096)
def _memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the dimensions from the largest stride to the smallest; None if memory has gaps or overlaps."""
    # A dimension of length one may have any stride; sorted last, it does no harm.
    order = sorted(range(len(shape)), key=lambda dim: -stride[dim] if shape[dim] > 1 else 0)
    expected = 1
    for dim in reversed(order):
        if shape[dim] > 1 and stride[dim] != expected:
            return None
        expected *= shape[dim]
    return tuple(order)
