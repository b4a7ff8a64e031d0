"""Training with several processes: what they must agree on, and tensors that are sharded among them.

Under ``DistributedDataParallel`` every process has all weights and a part of the batch; under ``fully_shard`` the
weights are sharded too, as DTensors. PyTorch averages the gradients in both cases. Two things are left to do. Numbers
that decide something must be the same on all processes, or they diverge and wait for each other forever. And sums over
a sharded vector must include all shards.

DTensors are recognised by their ``device_mesh``, because importing their class takes half as long as importing torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apo.torch_internals import active_data_parallel_wrapper, defers_gradient_reduction, uncompiled

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "ALONE", "Averaged", "Processes", "are_several", "fold_up", "is_sharded", "leaves_gradients", "shard_like",
    "summed_over_shards", "through_wrapper", "whole",
]  # fmt: skip

_PLAIN = (Tensor, nn.Parameter)

#: Whether processes work together at all; it is torch's own function, because steps ask.
are_several: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False


@final
class Processes:
    """The processes that train one network together; often just this one.

    Args:
        groups: One process group for data parallelism, or one per dimension of a mesh; together they span all
            processes.

    Example:
        >>> alone = Processes.of(nn.Linear(2, 2), [])
        >>> alone.groups, alone.gather(torch.tensor([1.0, 2.0]))
        ((), tensor([[1., 2.]]))
    """

    def __init__(self, groups: Iterable[Any] = ()) -> None:
        self.groups = tuple(groups)

    @classmethod
    def of(cls, model: nn.Module | None, parameters: Iterable[Tensor]) -> Processes:
        """Find the processes that share ``model`` (as ``DistributedDataParallel``) or ``parameters`` (as shards)."""
        if model is not None:
            model = model.wrapper if isinstance(model, Averaged) else uncompiled(model)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            return cls([model.process_group])
        for parameter in parameters:
            if is_sharded(parameter):
                mesh = cast("DTensor", parameter).device_mesh
                return cls([mesh.get_group(dimension) for dimension in range(mesh.ndim)])
        return cls()

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        """Return the same object: a process group cannot be copied."""
        return self

    def gather(self, values: Tensor) -> Tensor:
        """Return the values ``[n]`` of all processes as ``[processes, n]``, the same on each."""
        rows = values.detach().unsqueeze(0)
        for group in self.groups:
            parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, rows.contiguous(), group=group)
            rows = torch.cat(parts)
        return rows

    def agree(self, value: Tensor) -> float:
        """Return the mean of a number over the processes as a float, so that all make the same decision."""
        if not self.groups:
            return float(value)
        return float(self.gather(value.reshape(1)).mean())


#: Training with a single process.
ALONE = Processes()


@final
class Averaged(nn.Module):
    """A network inside ``DistributedDataParallel``, called so that the gradients are averaged over the processes.

    Only a forward pass through the wrapper prepares the reduction. Some frameworks wrap a network after it was passed
    to apo; others wrap a larger module that contains it. In that case the network temporarily replaces that module.

    Args:
        network: The network, or one of its submodules.
        wrapper: The wrapper around it.
    """

    def __init__(self, network: nn.Module, wrapper: nn.parallel.DistributedDataParallel) -> None:
        super().__init__()
        self.network = network
        self.wrapper = wrapper

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network."""
        inside = self.wrapper.module
        if inside is self.network:
            return self.wrapper(*args, **kwargs)
        own = vars(inside).get("forward")  # a framework may have set one
        inside.forward = self.network.__call__
        try:
            return self.wrapper(*args, **kwargs)
        finally:
            if own is None:
                del inside.forward
            else:
                inside.forward = own


def through_wrapper(network: nn.Module, known: nn.Module) -> nn.Module:
    """Return the module to call in place of ``network``, during a call of it, so that gradients are averaged.

    Args:
        network: The network.
        known: What this function returned before; returned again if it is still right.

    Example:
        >>> network = nn.Linear(2, 2)
        >>> through_wrapper(network, network) is network
        True
    """
    wrapper = active_data_parallel_wrapper()
    if wrapper is None or wrapper is network:
        return network
    return known if isinstance(known, Averaged) and known.wrapper is wrapper else Averaged(network, wrapper)


def leaves_gradients(model: nn.Module) -> bool:
    """Return whether a backward pass of several processes would now leave averaged gradients in the parameters.

    It would not under ``no_sync()``, nor after ``set_requires_gradient_sync(False)``, when ``fully_shard`` accumulates
    the gradients of micro-batches internally.

    Example:
        >>> leaves_gradients(nn.Linear(2, 2))
        True
    """
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and not module.require_backward_grad_sync:
            return False
        if isinstance(module, _sharded_module()) and defers_gradient_reduction(module):
            return False
    return True


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    # Checks for plain tensors first: a meta-step calls this a thousand times, nearly always with them.
    return type(tensor) not in _PLAIN and getattr(tensor, "device_mesh", None) is not None


def whole(tensor: Tensor) -> Tensor:
    """Assemble the shards of a DTensor on all processes; return other tensors unchanged."""
    return cast("DTensor", tensor).full_tensor() if is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """Shard a tensor that all processes hold in the same way as ``pattern``, if that is sharded."""
    if not is_sharded(pattern):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = cast(DTensor, pattern).device_mesh, cast(DTensor, pattern).placements
    replicated = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=placements)


def summed_over_shards(values: Tensor, vector: list[Tensor]) -> Tensor:
    """Add the other processes' sums to the sums ``[parts]`` over the local shards of each part of a vector.

    Parts that a dimension of the mesh replicates are not added along that dimension.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    kinds: dict[tuple, list[int]] = {}
    for index, tensor in enumerate(vector):
        if is_sharded(tensor):
            mesh, placements = cast(DTensor, tensor).device_mesh, cast(DTensor, tensor).placements
            kinds.setdefault((mesh, *(placement.is_replicate() for placement in placements)), []).append(index)
    values = values.clone()
    for (mesh, *replicated), indices in kinds.items():
        partial = [Replicate() if same else Partial() for same in replicated]
        values[indices] = DTensor.from_local(values[indices], mesh, partial, run_check=False).full_tensor()
    return values


def fold_up(modules: Iterable[nn.Module]) -> None:
    """Make modules under ``fully_shard`` free the weights that they have assembled from shards.

    A module may keep them, for instance after a forward pass without a backward pass, and would then use stale weights.
    """
    for module in modules:
        if isinstance(module, _sharded_module()):
            cast(Any, module).reshard()


@functools.cache
def _sharded_module() -> Any:
    """Return the class that ``fully_shard`` adds to a module; importing it is slow."""
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import FSDPModule  # pyright: ignore[reportPrivateImportUsage]
    return FSDPModule
