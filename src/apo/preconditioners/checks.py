"""Checks of the options and the checkpoints of a preconditioner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from apo.preconditioners.ownership import Ownership
from apo.preconditioners.plan import Layer

__all__ = ["check_clip", "check_factors", "check_group", "check_warmup"]


def check_group(group: dict[str, Any]) -> None:
    """Raise an error if an option of a param group is out of range."""
    _check_number("lr", group["lr"], "a positive number", lambda value: value > 0)
    _check_number("scale", group["scale"], "a positive number", lambda value: value > 0)
    _check_number("momentum", group["momentum"], "a number of at least 0 and below 1", lambda value: 0 <= value < 1)
    _check_number("weight_decay", group["weight_decay"], "a number of at least 0", lambda value: value >= 0)


def check_clip(clip: float | None) -> None:
    """Raise an error unless the bound on the update is a positive number or None."""
    if clip is not None:
        _check_number("clip", clip, "a positive number or None", lambda value: value > 0)


def check_warmup(warmup: Optimizer | None, steps: int, params: Sequence[Tensor]) -> None:
    """Raise an error unless the warm-up is complete and moves the same parameters."""
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"warmup_steps must be an integer of at least 0, got {steps!r}")
    if warmup is None:
        if steps:
            raise ValueError(
                f"warmup must be an optimizer if warmup_steps is {steps}, got None: pass one such as "
                "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)"
            )
        return
    if not isinstance(warmup, Optimizer):
        raise TypeError(f"warmup must be a torch.optim.Optimizer, got {type(warmup).__name__}")
    theirs = {id(p) for group in warmup.param_groups for p in group["params"] if p.requires_grad}
    if theirs != {id(p) for p in params}:
        raise ValueError(
            "warmup must have the preconditioner's parameters, got others: build both over the same parameters"
        )


def check_factors(layers: Sequence[Layer], saved: Mapping[str, Mapping[str, Tensor]], ownership: Ownership) -> None:
    """Raise an error unless a checkpoint fits ``layers``, or at least those that this process keeps."""
    names = [layer.name for layer in layers]
    needed = [layer.name for layer in layers if ownership.is_mine(layer)]
    for name in [*needed, *saved]:
        if name not in saved or name not in names:
            where = "the optimizer" if name in names else "state_dict"
            raise ValueError(
                f"state_dict must have the optimizer's layers, got {name!r} in {where} alone: build the optimizer as "
                "the saved one was"
            )
    for layer in layers:
        if layer.name not in saved:
            continue
        shapes = {key: tuple(tensor.shape) for key, tensor in layer.block.tensors.items()}
        found = {key: tuple(factor.shape) for key, factor in saved[layer.name].items()}
        if shapes != found:
            raise ValueError(
                f"state_dict must have factors {shapes} for layer {layer.name!r}, got {found}: "
                "build the optimizer with the same model, structure, conv and max_dim"
            )


def _check_number(name: str, value: Any, expected: str, fits: Any) -> None:
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")
    if not isfinite(value) or not fits(value):
        raise ValueError(f"{name} must be {expected}, got {value}")
