"""Which process keeps which block when several train one network together, and the product P g that they then share.

The factors of a block take more memory than its layer, and products with them more time. Instead of keeping every block
on every process, each block can have one *owner*, which keeps the factors, applies the block and broadcasts the result.
On the other processes the factors are on the ``meta`` device: shapes without memory.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apo.distributed import Processes, are_several, shard_like, whole
from apo.preconditioners.bundled import Groups, Kept, Rates, initial_steps
from apo.preconditioners.plan import Layer

__all__ = ["LayerByLayer", "Ownership", "balanced", "sharing_group"]


@final
class Ownership:
    """The owner of each block; this process owns all of them if there is no group. All processes have the same plan.

    Example:
        >>> from apo.preconditioners import plan_layers
        >>> layers = plan_layers(nn.Linear(2, 2))
        >>> ownership = Ownership(layers, None)
        >>> ownership.size, ownership.is_mine(layers[0])
        (1, True)
    """

    def __init__(self, layers: Sequence[Layer], group: Any) -> None:
        self.size = 1 if group is None else dist.get_world_size(group)
        self._group: Any = group
        self._rank = 0 if group is None else dist.get_rank(group)
        # The number of concurrent broadcasts: one per process, so that all owners compute at once. With gloo only one,
        # because the next gradient is assembled meanwhile by a functional collective, and torch 2.13 corrupts its
        # memory about once in ten thousand times if gloo is busy with another operation.
        self.at_once = 1 if group is None or dist.get_backend(group) == "gloo" else self.size
        # Both the memory of a block and the time of a product grow with the size of its tensors.
        costs = [sum(tensor.numel() for tensor in layer.block.tensors.values()) for layer in layers]
        names = [layer.name for layer in layers]
        self._owners = dict(zip(names, balanced(costs, self.size), strict=True))

    def is_mine(self, layer: Layer) -> bool:
        """Return whether this process keeps the block of a layer."""
        return self._owners[layer.name] == self._rank

    def start(self, layer: Layer, gradient: Tensor) -> tuple[Tensor, Any]:
        """Start computing P g of one layer; every process calls this for the same layers in the same order.

        Returns:
            The tensor that will hold the result, and what to ``wait()`` for (None if it is ready).
        """
        if self.size == 1:
            return layer.block.apply(gradient), None
        if self.is_mine(layer):
            result = layer.block.apply(gradient).contiguous()
        else:
            factor = next(iter(layer.block.factors.values()))
            result = torch.empty(layer.block.shape, dtype=factor.dtype, device=gradient.device)
        owner = dist.get_global_rank(self._group, self._owners[layer.name])
        return result, dist.broadcast(result, owner, group=self._group, async_op=True)

    def add_up(self, values: Tensor) -> None:
        """Sum a tensor over the processes, in place; each fills in its own entries and leaves the others zero."""
        dist.all_reduce(values, group=self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ownership:
        """Return the same object: a copied optimizer belongs to the same processes."""
        return self


@final
class LayerByLayer:
    """Multiplies the gradient of each layer by its block; with several processes, on the block's owner.

    The methods are those of ``Bundled``. All processes have to call them, to assemble the shards of tensors.

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
    ) -> tuple[dict[Tensor, Tensor], Kept]:
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
        return found, Kept(kept, rates)

    def pull_back(self, kept: Kept, cotangents: Mapping[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Pull back the blocks that this process keeps."""
        found = {}
        for layer in self._layers:
            # A parameter without gradient does not move, so its cotangent is zero.
            parts = [kept.rates[p] * whole(cotangents[p]) if p in cotangents else None for p in layer.params]
            if layer.name in kept.gradients:
                found[layer.name] = layer.block.pull_back(kept.gradients[layer.name], layer.view.gather(parts))
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
        self._ownership.add_up(values)
        return dict(zip((layer.name for layer in self._layers), values, strict=True))

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


def balanced(costs: Sequence[float], workers: int) -> list[int]:
    """Return a worker for each task: the largest task first, each to the worker with the least work so far.

    Example:
        >>> balanced([1, 5, 2, 3], 2)
        [0, 0, 1, 1]
    """
    loads = [(0.0, worker) for worker in range(workers)]
    chosen = [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, worker = heapq.heappop(loads)
        chosen[task] = worker
        heapq.heappush(loads, (load + costs[task], worker))
    return chosen


def sharing_group(model: Any, parameters: Sequence[Tensor], distribute: bool | None) -> Any:
    """Return the process group that shares the blocks, or None if every process keeps all of them.

    Args:
        model: The network.
        parameters: Its parameters.
        distribute: The user's choice. None: share if the weights are sharded, which suggests that memory is short.
    """
    module = model if isinstance(model, nn.Module) else None
    sharded = Processes.of(None, parameters).groups
    if distribute is False or (distribute is None and not sharded):
        return None
    groups = sharded or Processes.of(module, parameters).groups
    if groups:
        return groups[-1]  # if a mesh also replicates, its last dimension is the one that shards
    return dist.group.WORLD if are_several() else None
