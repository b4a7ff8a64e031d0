"""Names of parameters and factors that do not depend on the number of processes or on wrappers."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from apo.preconditioners import Preconditioner
from apo.torch_internals import uncompiled

__all__ = ["NamedTensors", "block_tensors", "factor_names", "parameter_names", "unwrapped"]

NamedTensors = dict[str, Tensor]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network inside ``torch.compile`` and ``DistributedDataParallel``.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> unwrapped(nn.DataParallel(model)) is model
        True
    """
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif (inside := uncompiled(model)) is not model:
            model = inside
        else:
            return model


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters, in its order; those not in the network are numbered.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2)
        >>> parameter_names(nn.DataParallel(model), torch.optim.SGD(model.parameters(), lr=1.0))
        ['weight', 'bias']
    """
    names = {id(p): name for name, p in unwrapped(model).named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(p), f"unnamed.{index}") for index, p in enumerate(parameters)]


def block_tensors(optimizer: Preconditioner) -> NamedTensors:
    """Return the factors and statistics that this process keeps, by name.

    Example:
        >>> from apo import Diagonal
        >>> list(block_tensors(Diagonal(nn.Linear(2, 2))))
        ['weight/s', 'bias/s']
    """
    own = [layer for layer in optimizer.layers if optimizer.ownership.is_mine(layer)]
    return {f"{layer.name}/{key}": tensor for layer in own for key, tensor in layer.block.tensors.items()}


def factor_names(optimizer: Preconditioner) -> list[str]:
    """Return the names of the factors that this process keeps, in the order of ``optimizer.factors()``.

    Example:
        >>> from apo import Kronecker
        >>> factor_names(Kronecker(nn.Linear(2, 2)))
        ['weight/A', 'weight/B', 'weight/S']
    """
    return [
        f"{layer.name}/{key}"
        for layer in optimizer.layers
        if optimizer.ownership.is_mine(layer)
        for key in layer.block.factors
    ]
