"""From P g to a step: momentum, clipping, scale and schedule, and decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from apo.distributed import is_sharded, whole
from apo.preconditioners.bundled import Groups
from apo.torch_internals import foreach_add_, foreach_mul, foreach_mul_, foreach_norm
from apo.vectors import local_parts

__all__ = ["move_weights"]


def move_weights(
    groups: Groups,
    directions: Mapping[Tensor, Tensor],
    state: Any,
    clip: float | None,
    sharded: bool,
    averaged: bool,
    mean_steps: Mapping[Tensor, Tensor] | None,
) -> None:
    """Move every parameter that has a direction, with a few ``foreach`` operations per group.

    Args:
        groups: The optimizer's param groups.
        directions: P g, by parameter.
        state: The optimizer's state, which keeps the momentum.
        clip: The largest norm of the update of all parameters together, or None.
        sharded: Whether some parameters are DTensors: every process then moves its shards, without communication.
        averaged: Whether momentum is a running average of P g, instead of a sum that fades.
        mean_steps: The mean eigenvalue of P by parameter, if decoupled weight decay is in proportion to it.
    """
    local = local_parts if sharded else list
    moving, updates, rates = [], [], []
    for group in groups:
        params = [p for p in group["params"] if p in directions]
        if not params:
            continue
        update = [directions[p] for p in params]
        if group["momentum"]:
            # Momentum is of P g, not of g, so that past steps keep the P they were taken with.
            for p, direction in zip(params, update, strict=True):
                if "momentum_buffer" not in state[p]:
                    state[p]["momentum_buffer"] = torch.zeros_like(direction)
            buffers = [state[p]["momentum_buffer"] for p in params]
            foreach_mul_(local(buffers), group["momentum"])
            foreach_add_(local(buffers), local(update), alpha=1.0 - group["momentum"] if averaged else 1.0)
            update = buffers
        moving.append((group, params))
        updates.append(update)
        # reference_lr is the lr that P started with, so lr / reference_lr is the factor of a schedule.
        rates.append(-group["scale"] * group["lr"] / group["reference_lr"])
    if clip is not None and moving:
        updates = _clipped(updates, rates, clip)
    for (group, params), update, rate in zip(moving, updates, rates, strict=True):
        if group["decoupled_weight_decay"] and group["weight_decay"]:
            if mean_steps is None:
                foreach_mul_(local(params), 1.0 - group["lr"] * group["weight_decay"])
            else:
                for p, part in zip(params, local(params), strict=True):
                    part.mul_(1.0 - (-rate * group["weight_decay"] * mean_steps[p]).clamp(max=1.0))
        foreach_add_(local(params), local(update), alpha=rate)


def _clipped(updates: Sequence[list[Tensor]], rates: Sequence[float], limit: float) -> list[list[Tensor]]:
    """Shrink the update to a norm of at most ``limit``, without waiting for the device."""
    device, norms, clipped = updates[0][0].device, [], []
    for update, rate in zip(updates, rates, strict=True):
        if any(is_sharded(tensor) for tensor in update):
            parts = [whole(torch.linalg.vector_norm(tensor)) for tensor in update]
        else:
            parts = foreach_norm(update)
        norms.append(abs(rate) * torch.stack([part.to(device) for part in parts]))
    factor = (limit / torch.linalg.vector_norm(torch.cat(norms))).clamp(max=1.0)
    for update in updates:
        # A single launch for the list needs one device, one type and no DTensor.
        if any(is_sharded(tensor) for tensor in update) or len({(t.device, t.dtype) for t in update}) > 1:
            clipped.append([tensor * factor.to(tensor.device, tensor.dtype) for tensor in update])
        else:
            clipped.append(foreach_mul(update, factor.to(update[0].device, update[0].dtype)))
    return clipped
