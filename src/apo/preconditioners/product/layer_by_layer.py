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
from apo.preconditioners.product.bundled import Groups, LookAhead, Rates, initial_steps

__all__ = ["LayerByLayer"]


@final
class LayerByLayer:
    """Multiplies the gradient of each layer by its block; with several processes, on the block's owner.

    The methods are those of :class:`Bundled`. All processes have to call them, to assemble the shards of tensors.

    Args:
        layers: The plan.
        ownership: Which process keeps which block.

    Example:
        >>> from apo.preconditioners import plan_layers
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> layers = plan_layers(model)
        >>> product = LayerByLayer(layers, Ownership(layers, None))
        >>> group = {"params": [model.weight], "initial_step": 0.1, "weight_decay": 0.0}
        >>> product.multiply([group], {model.weight: torch.ones(1, 2)})[0][model.weight]
        tensor([[0.1000, 0.1000]])
    """

    def __init__(self, layers: Sequence[Layer], ownership: Ownership) -> None:
        self._layers = layers
        self._ownership = ownership

    def multiply(
        self, groups: Groups, gradients: Mapping[Tensor, Tensor], look_ahead: bool = False
    ) -> tuple[dict[Tensor, Tensor], LookAhead]:
        """Return P g, or -P g to look ahead, sharded as the parameters are."""
        before, rates = initial_steps(self._layers, groups, look_ahead)
        kept: dict[Any, Tensor] = {}
        found: dict[Tensor, Tensor] = {}
        under_way: deque[tuple[Layer, Tensor, Any]] = deque()

        def finish_first() -> None:
            layer, product, work = under_way.popleft()
            if work is not None:
                work.wait()
            parts = zip(layer.params, layer.view.scatter(product), strict=True)
            found.update({p: shard_like(rates[p] * part, p) for p, part in parts if p in gradients})

        for layer, gradient in self._gathered(groups, gradients, before):
            if look_ahead:
                # A gathered gradient may share memory with .grad, which the next backward pass overwrites.
                gradient = gradient.clone()
                if self._ownership.is_mine(layer):
                    kept[layer.name] = gradient
            under_way.append((layer, *self._ownership.start(layer, gradient)))
            # Owners of different blocks compute at the same time, while earlier results are being sent.
            if len(under_way) == self._ownership.at_once:
                finish_first()
        while under_way:
            finish_first()
        return found, LookAhead(kept, rates)

    def pull_back(self, look_ahead: LookAhead, cotangents: Mapping[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Pull back the blocks that this process keeps."""
        found = {}
        for layer in self._layers:
            # A parameter without gradient does not move, so its cotangent is zero.
            parts = [look_ahead.rates[p] * whole(cotangents[p]) if p in cotangents else None for p in layer.params]
            if layer.name in look_ahead.gradients:
                gradient = look_ahead.gradients[layer.name]
                found[layer.name] = layer.block.pull_back(gradient, layer.view.gather(parts))
        return found

    def observe(self, groups: Groups, gradients: Mapping[Tensor, Tensor], sampled: bool = False) -> None:
        """Update the blocks that this process keeps."""
        before = initial_steps(self._layers, groups)[0]
        for layer, gradient in self._gathered(groups, gradients, before, decayed=not sampled):
            if self._ownership.is_mine(layer):
                layer.block.observe(gradient, sampled)

    def mean_eigenvalues(self) -> dict[str, Tensor]:
        """Return the mean eigenvalues of all blocks."""
        if self._ownership.size == 1:
            return {layer.name: layer.block.summary()["mean_eigenvalue"] for layer in self._layers}
        values = torch.zeros(len(self._layers), device=self._layers[0].params[0].device)
        for index, layer in enumerate(self._layers):
            if self._ownership.is_mine(layer):
                values[index] = layer.block.summary()["mean_eigenvalue"]
        return dict(zip((layer.name for layer in self._layers), self._ownership.share(values), strict=True))

    def _gathered(
        self, groups: Groups, gradients: Mapping[Tensor, Tensor], before: Rates, decayed: bool = True
    ) -> Iterator[tuple[Layer, Tensor]]:
        """Return the gradient of each layer that has one; it may share memory with ``.grad``."""
        group_of = {p: group for group in groups for p in group["params"]}
        for layer in self._layers:
            parts = [gradients.get(p) for p in layer.params]
            if all(part is None for part in parts):
                continue
            for index, (p, part) in enumerate(zip(layer.params, parts, strict=True)):
                if part is not None:
                    group = group_of[p]
                    if decayed and group["weight_decay"] and not group["decoupled_weight_decay"]:
                        part = part.add(p, alpha=group["weight_decay"])
                    parts[index] = whole(before[p] * part if p in before else part)
            yield layer, layer.view.gather(parts)
