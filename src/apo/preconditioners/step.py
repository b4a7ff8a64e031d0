"""From directions to moved weights: momentum, scale, clipping and decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apo.distributed import is_sharded, whole
from apo.preconditioners.product.direction import Groups
from apo.vectors import advance_

__all__ = ["move_weights"]


def move_weights(groups: Groups, directions: Mapping[Tensor, Tensor], state: Any, clip: float | None) -> None:
    """Move every parameter that has a direction, in as few operations as there are kinds of parameters.

    Args:
        groups: The optimizer's param groups.
        directions: P g, by parameter.
        state: The optimizer's state, which keeps the momentum.
        clip: The largest norm of the update of all parameters together, or None.
    """
    moving = [(group, [p for p in group["params"] if p in directions]) for group in groups]
    moving = [(group, params) for group, params in moving if params]
    rates = [-group["scale"] * group["lr"] / group["reference_lr"] for group, _ in moving]
    updates = [_averaged([directions[p] for p in params], params, state, group["momentum"]) for group, params in moving]
    if clip is not None and moving:
        factor = _clipping_factor(updates, rates, clip)
        updates = [_shrunk(update, factor) for update in updates]
    for (group, params), update, rate in zip(moving, updates, rates, strict=True):
        if group["decoupled_weight_decay"] and group["weight_decay"]:
            torch._foreach_mul_(_local(params), 1.0 - group["lr"] * group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
        advance_(params, update, rate)


def _clipping_factor(updates: Sequence[list[Tensor]], rates: Sequence[float], limit: float) -> Tensor:
    """Return what shrinks an update to a norm of at most ``limit``, without asking the device for the number."""
    device = updates[0][0].device
    norms = [
        abs(rate) * torch.stack([value.to(device) for value in _norms(update)])
        for update, rate in zip(updates, rates, strict=True)
    ]
    return (limit / torch.linalg.vector_norm(torch.cat(norms))).clamp(max=1.0)


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    if any(is_sharded(tensor) for tensor in tensors):
        return [whole(torch.linalg.vector_norm(tensor)) for tensor in tensors]
    return torch._foreach_norm(tensors)  # pyright: ignore[reportPrivateImportUsage]


def _shrunk(tensors: list[Tensor], factor: Tensor) -> list[Tensor]:
    if any(is_sharded(tensor) for tensor in tensors) or len({(t.device, t.dtype) for t in tensors}) > 1:
        return [tensor * factor.to(tensor.device, tensor.dtype) for tensor in tensors]
    return list(torch._foreach_mul(tensors, factor.to(tensors[0].device, tensors[0].dtype)))  # pyright: ignore[reportPrivateImportUsage]


def _averaged(directions: list[Tensor], params: Sequence[Tensor], state: Any, momentum: float) -> list[Tensor]:
    """Add directions to their momentum and return that."""
    if not momentum:
        return directions
    for p, direction in zip(params, directions, strict=True):
        if "momentum_buffer" not in state[p]:
            state[p]["momentum_buffer"] = torch.zeros_like(direction)
    buffers = [state[p]["momentum_buffer"] for p in params]
    torch._foreach_mul_(_local(buffers), momentum)  # pyright: ignore[reportPrivateImportUsage]
    advance_(buffers, directions, 1.0)
    return buffers


def _local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the memory that this process holds of each tensor, to be changed in place."""
    return [tensor.detach().to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]
