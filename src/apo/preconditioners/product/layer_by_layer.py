"""The product P g one layer at a time: the simplest way, and the one that processes can share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from apo.distributed import shard_like, whole
from apo.preconditioners.ownership import Ownership
from apo.preconditioners.plan import Layer
from apo.preconditioners.product.direction import Direction
from apo.preconditioners.step import Groups, Rates, initial_steps

__all__ = ["LayerByLayer"]


@final
class LayerByLayer(Direction):
    """Multiplies the gradient of each layer by its block; with several processes, on the block's owner.

    Args:
        layers: The plan.
        ownership: Which process keeps which block.

    Example:
        >>> from apo.preconditioners import plan_layers
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model.weight.grad = torch.ones(1, 2)
        >>> layers = plan_layers(model)
        >>> direction = LayerByLayer(layers, Ownership(layers, None))
        >>> group = {"params": [model.weight], "initial_step": 0.1, "weight_decay": 0.0}
        >>> direction.directions([group])[model.weight]
        tensor([[0.1000, 0.1000]])
    """

    def __init__(self, layers: Sequence[Layer], ownership: Ownership) -> None:
        self._layers = layers
        self._ownership = ownership
        self.forget()

    def directions(self, groups: Groups) -> dict[Tensor, Tensor]:
        """Return P g, sharded as the parameters are."""
        return self._multiplied(groups, look_ahead=False)

    def displacements(self, groups: Groups) -> dict[Tensor, Tensor]:
        """Return -P g, sharded as the parameters are."""
        return self._multiplied(groups, look_ahead=True)

    def pull_back(self, cotangents: Mapping[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Pull back the blocks that this process keeps."""
        found = {}
        for layer in self._layers:
            # A parameter without gradient does not move, so its cotangent is zero. All processes have to assemble the
            # shards of a cotangent, although only the owner needs it.
            parts = [self._rates[p] * whole(cotangents[p]) if p in cotangents else None for p in layer.params]
            if layer.name in self._gradients:
                found[layer.name] = layer.block.pull_back(self._gradients[layer.name], layer.view.gather(parts))
        return found

    def observe(self, groups: Groups, sampled: Mapping[Tensor, Tensor] | None = None) -> None:
        """Update the blocks that this process keeps; all processes have to assemble the shards of a gradient."""
        for layer, gradient in self._gathered(groups, initial_steps(self._layers, groups)[0], sampled):
            if self._ownership.is_mine(layer):
                layer.block.observe(gradient, sampled is not None)

    def mean_eigenvalues(self) -> dict[str, Tensor]:
        """Return the mean eigenvalues; if the blocks are distributed, all processes have to call this."""
        if self._ownership.size == 1:
            return {layer.name: layer.block.summary()["mean_eigenvalue"] for layer in self._layers}
        values = torch.zeros(len(self._layers), device=self._layers[0].params[0].device)
        for index, layer in enumerate(self._layers):
            if self._ownership.is_mine(layer):
                values[index] = layer.block.summary()["mean_eigenvalue"]
        return dict(zip((layer.name for layer in self._layers), self._ownership.share(values), strict=True))

    def forget(self) -> None:
        """Drop the gradients."""
        self._gradients: dict[str, Tensor] = {}  # of the last displacements, for blocks that this process keeps
        self._rates: Rates = {}

    def _multiplied(self, groups: Groups, look_ahead: bool) -> dict[Tensor, Tensor]:
        """Return P g; to look ahead, -P g, and remember what :meth:`pull_back` needs."""
        before, rates = initial_steps(self._layers, groups)
        if look_ahead:
            self.forget()
            self._rates = rates = {p: -rate for p, rate in rates.items()}
        found: dict[Tensor, Tensor] = {}
        under_way: deque[tuple[Layer, Tensor, Any]] = deque()
        for layer, gradient in self._gathered(groups, before):
            if look_ahead:
                # A gathered gradient may share memory with .grad, which the next backward pass overwrites.
                gradient = gradient.clone()
                if self._ownership.is_mine(layer):
                    self._gradients[layer.name] = gradient
            under_way.append((layer, *self._ownership.start(layer, gradient)))
            # Owners of different blocks compute at the same time, while earlier results are being sent.
            if len(under_way) == self._ownership.at_once:
                found |= _finished(*under_way.popleft(), rates)
        while under_way:
            found |= _finished(*under_way.popleft(), rates)
        return found

    def _gathered(
        self, groups: Groups, before: Rates, sampled: Mapping[Tensor, Tensor] | None = None
    ) -> Iterator[tuple[Layer, Tensor]]:
        """Return the gradient of each layer that has one; it may share memory with ``.grad``."""
        group_of = {p: group for group in groups for p in group["params"]}
        for layer in self._layers:
            if sampled is None:
                gradients = [_gradient(p, group_of[p], before.get(p, 1.0)) for p in layer.params]
            else:
                gradients = [before.get(p, 1.0) * whole(sampled[p]) if p in sampled else None for p in layer.params]
            if any(gradient is not None for gradient in gradients):
                yield layer, layer.view.gather(gradients)


def _finished(layer: Layer, product: Tensor, work: Any, rates: Rates) -> dict[Tensor, Tensor]:
    """Wait for the product of one layer and return its part for each parameter."""
    if work is not None:
        work.wait()
    parts = zip(layer.params, layer.view.scatter(product), strict=True)
    return {p: shard_like(rates[p] * part, p) for p, part in parts if p.grad is not None}


def _gradient(p: Tensor, group: Mapping[str, Any], rate: float) -> Tensor | None:
    if p.grad is None:
        return None
    gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
    if group["weight_decay"] and not group["decoupled_weight_decay"]:
        gradient = gradient.add(p, alpha=group["weight_decay"])
    return whole(gradient if rate == 1.0 else rate * gradient)
