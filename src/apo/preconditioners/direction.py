"""The product P g, layer by layer, from the gradients that the parameters have."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apo.processes import shard_like, whole

from .layers import Layer
from .ownership import Ownership

__all__ = ["BlockInput", "block_inputs", "clipped", "preconditioned"]

Groups = Mapping[Tensor, Mapping[str, Any]]


class BlockInput(NamedTuple):
    """What enters the block of one layer, and what multiplies its result.

    Attributes:
        layer: The layer.
        gradient: Its gathered gradient.
        rates: For each parameter the factor on the block's result.
    """

    layer: Layer
    gradient: Tensor
    rates: list[float]


def block_inputs(layers: Sequence[Layer], groups: Groups) -> Iterator[BlockInput]:
    """Yield the inputs of all blocks that have at least one gradient.

    Args:
        layers: The plan.
        groups: The param group of each parameter.
    """
    for layer in layers:
        gradients = [_gradient(p, groups[p]) for p in layer.params]
        if any(gradient is not None for gradient in gradients):
            before, after = _split([groups[p]["initial_step"] for p in layer.params])
            weighted = [
                gradient if gradient is None or rate == 1.0 else rate * gradient
                for gradient, rate in zip(gradients, before, strict=True)
            ]
            yield BlockInput(layer, layer.view.gather(weighted), after)


def preconditioned(inputs: Iterable[BlockInput], ownership: Ownership) -> dict[Tensor, Tensor]:
    """Return P g for every parameter of the layers given, sharded as the parameter is."""
    found = {}
    for layer, product, rates in _products(inputs, ownership):
        parts = layer.view.scatter(product)
        for p, part, rate in zip(layer.params, parts, rates, strict=True):
            found[p] = shard_like(rate * part, p)
    return found


def _products(inputs: Iterable[BlockInput], ownership: Ownership) -> Iterator[BlockInput]:
    """Yield each block's product with its gradient; with many processes, as many as there are work at a time."""
    under_way: deque[tuple[BlockInput, Any]] = deque()
    for layer, gradient, rates in inputs:
        product, work = ownership.start(layer, gradient)
        under_way.append((BlockInput(layer, product, rates), work))
        if len(under_way) == ownership.size:
            yield _finished(under_way)
    while under_way:
        yield _finished(under_way)


def _finished(under_way: deque[tuple[BlockInput, Any]]) -> BlockInput:
    product, work = under_way.popleft()
    if work is not None:
        work.wait()
    return product


def clipped(updates: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Shrink an update to a norm of at most ``limit``, without asking the device for the number."""
    if not updates:
        return []
    norms = [whole(torch.linalg.vector_norm(update)).to(updates[0].device) for update in updates]
    factor = (limit / torch.linalg.vector_norm(torch.stack(norms))).clamp(max=1.0)
    return [update * factor.to(update.device, update.dtype) for update in updates]


def _gradient(p: Tensor, group: Mapping[str, Any]) -> Tensor | None:
    if p.grad is None:
        return None
    gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
    if group["weight_decay"] and not group["decoupled_weight_decay"]:
        gradient = gradient.add(p, alpha=group["weight_decay"])
    return whole(gradient)


def _split(steps: list[float]) -> tuple[list[float], list[float]]:
    """Share the step sizes between the two sides of a symmetric P; one common size needs one side only."""
    if len(set(steps)) == 1:
        return [1.0] * len(steps), steps
    roots = [step**0.5 for step in steps]
    return roots, roots
