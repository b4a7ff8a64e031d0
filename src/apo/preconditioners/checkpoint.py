"""Reading a checkpoint into a preconditioner, without replacing or narrowing a tensor that is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from apo.preconditioners.ownership import Ownership
from apo.preconditioners.plan import Layer

__all__ = ["check_factors", "load_factors", "load_momentum"]

Factors = Mapping[str, Mapping[str, Tensor]]


def check_factors(layers: Sequence[Layer], saved: Factors, ownership: Ownership) -> None:
    """Raise a ValueError unless ``saved`` has the factors of ``layers`` (those kept here at least), in their shapes."""
    names = [layer.name for layer in layers]
    needed = [layer.name for layer in layers if ownership.is_mine(layer)]
    for name in [*needed, *saved]:
        if name not in saved or name not in names:
            where = "the optimizer" if name in names else "state_dict"
            raise ValueError(
                f"layer {name!r} is in {where} alone: load into a preconditioner built as the saved one was."
            )
    for layer in layers:
        if layer.name not in saved:
            continue
        shapes = {key: tuple(factor.shape) for key, factor in layer.block.factors.items()}
        found = {key: tuple(factor.shape) for key, factor in saved[layer.name].items()}
        if shapes != found:
            raise ValueError(
                f"layer {layer.name!r} has factors {shapes}, but state_dict holds {found}: "
                "build the optimizer with the same model, structure, conv and max_dim."
            )


def load_factors(layers: Sequence[Layer], saved: Factors) -> None:
    """Copy saved factors into those of ``layers``."""
    for layer in layers:
        if layer.name not in saved:
            continue  # another process keeps it
        for key, factor in layer.block.factors.items():
            factor.copy_(saved[layer.name][key])


def load_momentum(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Restore momentum buffers in the type they were saved in; torch casts them to the parameter's."""
    ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, p in zip(ids, params, strict=True):
        buffer = state_dict["state"].get(key, {}).get("momentum_buffer")
        if buffer is not None:
            optimizer.state[p]["momentum_buffer"] = buffer.to(p.device, copy=True)
