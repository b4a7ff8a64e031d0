"""The product P g one layer after the other: the obvious way, and the one that processes can share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from apo.distributed import shard_like, whole
from apo.preconditioners.ownership import Ownership
from apo.preconditioners.plan import Layer
from apo.preconditioners.product.direction import Direction, Groups, Rates, initial_steps

__all__ = ["LayerByLayer"]


class _Item(NamedTuple):
    """A layer, and its gathered gradient or the product with it."""

    layer: Layer
    tensor: Tensor


@final
class LayerByLayer(Direction):
    """Multiplies the gradient of each layer by its block; with many processes, by the block's owner.

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
        self._remembered: tuple[list[_Item], Rates] = ([], {})

    def directions(self, groups: Groups) -> dict[Tensor, Tensor]:
        """Return P g, sharded as the parameters are."""
        before, after = initial_steps(self._layers, groups)
        return self._results(self._inputs(groups, before), after)

    def displacements(self, groups: Groups) -> dict[Tensor, Tensor]:
        """Return -P g, sharded as the parameters are."""
        before, after = initial_steps(self._layers, groups)
        self._remembered = ([], {p: -rate for p, rate in after.items()})
        return self._results(self._kept(self._inputs(groups, before)), self._remembered[1])

    def pull_back(self, cotangents: Mapping[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Pull back the blocks that this process keeps."""
        items, rates = self._remembered
        mine = {layer.name: gradient for layer, gradient in items}
        found = {}
        for layer in self._layers:
            # A parameter without gradient does not move, so nothing depends on what P says about it. All processes
            # put the shards of a cotangent together, for the one of them that needs it.
            parts = [rates[p] * whole(cotangents[p]) if p in cotangents else None for p in layer.params]
            if layer.name in mine:
                found[layer.name] = layer.block.pull_back(mine[layer.name], layer.view.gather(parts))
        return found

    def mean_eigenvalues(self) -> dict[str, Tensor]:
        """Return the mean eigenvalues; where blocks are distributed, all processes have to ask at once."""
        if self._ownership.size == 1:
            return {layer.name: layer.block.summary()["mean_eigenvalue"] for layer in self._layers}
        values = torch.zeros(len(self._layers), device=self._layers[0].params[0].device)
        for index, layer in enumerate(self._layers):
            if self._ownership.is_mine(layer):
                values[index] = layer.block.summary()["mean_eigenvalue"]
        return dict(zip((layer.name for layer in self._layers), self._ownership.share(values), strict=True))

    def forget(self) -> None:
        """Drop the gradients."""
        self._remembered = ([], {})

    def _results(self, items: Iterator[_Item], rates: Rates) -> dict[Tensor, Tensor]:
        found = {}
        for layer, product in self._products(items):
            for p, part in zip(layer.params, layer.view.scatter(product), strict=True):
                if p.grad is not None:
                    found[p] = shard_like(rates[p] * part, p)
        return found

    def _inputs(self, groups: Groups, before: Rates) -> Iterator[_Item]:
        """Yield the gathered gradients of all layers that have at least one."""
        group_of = {p: group for group in groups for p in group["params"]}
        for layer in self._layers:
            gradients = [_gradient(p, group_of[p], before.get(p, 1.0)) for p in layer.params]
            if any(gradient is not None for gradient in gradients):
                yield _Item(layer, layer.view.gather(gradients))

    def _kept(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Remember the gradients of the blocks that are kept here."""
        for layer, gradient in items:
            # A gathered gradient may share memory with .grad, which a backward pass at the look-ahead overwrites.
            item = _Item(layer, gradient.clone())
            if self._ownership.is_mine(layer):
                self._remembered[0].append(item)
            yield item

    def _products(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Yield each block's product with its gradient; with many processes, some of them work at a time."""
        under_way: deque[tuple[_Item, Any]] = deque()
        for layer, gradient in items:
            product, work = self._ownership.start(layer, gradient)
            under_way.append((_Item(layer, product), work))
            if len(under_way) == self._ownership.at_once:
                yield _finished(under_way)
        while under_way:
            yield _finished(under_way)


def _finished(under_way: deque[tuple[_Item, Any]]) -> _Item:
    product, work = under_way.popleft()
    if work is not None:
        work.wait()
    return product


def _gradient(p: Tensor, group: Mapping[str, Any], rate: float) -> Tensor | None:
    if p.grad is None:
        return None
    gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
    if group["weight_decay"] and not group["decoupled_weight_decay"]:
        gradient = gradient.add(p, alpha=group["weight_decay"])
    return whole(gradient if rate == 1.0 else rate * gradient)
