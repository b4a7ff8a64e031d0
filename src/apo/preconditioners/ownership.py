"""Which process keeps which block when several train one network together.

The factors of a block take more memory than its layer, and products with them more time. Instead of keeping every block
on every process, each block can have one *owner*, which keeps the factors, applies the block and broadcasts the result.
On the other processes the factors are on the ``meta`` device: shapes without memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apo.distributed import Processes
from apo.preconditioners.plan import Layer

__all__ = ["Ownership", "balanced", "sharing_group"]


@final
class Ownership:
    """The owner of each block; this process owns all of them if there is no group.

    Args:
        layers: The plan, the same on all processes.
        group: The process group that shares the blocks, or None.

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

    def release_others(self, layers: Sequence[Layer]) -> None:
        """Free the memory of the factors that other processes keep."""
        for layer in layers:
            if not self.is_mine(layer):
                layer.block.release_factors()

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

    def share(self, values: Tensor) -> Tensor:
        """Sum a tensor over the processes; each fills in its own entries and leaves the others zero."""
        if self.size > 1:
            dist.all_reduce(values, group=self._group)
        return values

    def __deepcopy__(self, memo: dict[int, Any]) -> Ownership:
        """Return the same object: a copied optimizer belongs to the same processes."""
        return self


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
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
