"""The parts of a network: found quickly, as a meta-step asks for them several times, and exchanged for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["devices_of", "every_module", "fresh_leaves"]


def every_module(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules and all inside them, each once.

    Torch's own ``modules()`` hands each one through a generator for every level above it, which takes more than twice
    as long.

    Example:
        >>> inside = nn.Linear(1, 1)
        >>> len(every_module([nn.Sequential(inside, nn.Sequential(inside))]))
        3
    """
    found = {id(root): root for root in roots}
    waiting = list(found.values())
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


def devices_of(model: nn.Module) -> set[torch.device]:
    """Return where the parameters of a network live.

    Example:
        >>> devices_of(nn.Linear(1, 1))
        {device(type='cpu')}
    """
    owners = every_module([model])
    return {p.device for owner in owners for p in owner._parameters.values() if p is not None}


@contextmanager
def fresh_leaves(network: nn.Module) -> Iterator[dict[Tensor, nn.Parameter]]:
    """Let new parameters over the same memory stand in for those of a network, and put these back at the end.

    As long as any autograd graph leads to a parameter, autograd keeps the stream on which its gradients accumulate. A
    backward pass that is recorded on another stream would have to wait for that one, which breaks the recording. New
    parameters have no past, and no hooks.

    Yields:
        The stand-ins, by the parameters.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> with fresh_leaves(layer) as leaves:
        ...     layer.weight is leaves[next(iter(leaves))], layer.weight.grad
        (True, None)
    """
    places = [
        (module, name, parameter)
        for module in every_module([network])
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    leaves: dict[Tensor, nn.Parameter] = {p: nn.Parameter(p.detach(), p.requires_grad) for _, _, p in places}
    try:
        for module, name, parameter in places:
            setattr(module, name, leaves[parameter])
        yield leaves
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)
