"""Conversion between named parameters and one flat vector."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Concatenate named tensors, in their order, into one vector.

    Example:
        >>> flatten({"a": torch.zeros(2), "b": torch.ones(1, 1)})
        tensor([0., 0., 1.])
    """
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split a vector into named tensors shaped like the given ones; the inverse of :func:`flatten`.

    Raises:
        ValueError: If the sizes do not add up.

    Example:
        >>> unflatten(torch.arange(3.0), {"a": torch.zeros(2), "b": torch.ones(1, 1)})
        {'a': tensor([0., 1.]), 'b': tensor([[2.]])}
    """
    sizes = [tensor.numel() for tensor in like.values()]
    if vector.ndim != 1 or vector.numel() != sum(sizes):
        raise ValueError(
            f"vector must have the {sum(sizes)} elements of the named tensors, got shape {tuple(vector.shape)}"
        )
    return {
        name: part.reshape(tensor.shape) for (name, tensor), part in zip(like.items(), vector.split(sizes), strict=True)
    }


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return detached copies of the model's trainable parameters by name.

    Example:
        >>> list(parameters_of(nn.Linear(1, 1)))
        ['weight', 'bias']
    """
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
