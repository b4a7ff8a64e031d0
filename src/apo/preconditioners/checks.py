"""What the options and the checkpoints of a preconditioner may be, and what to say when they are not."""

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
    """Refuse a param group with an option out of range."""
    _check_number("lr", group["lr"], "a positive number", lambda value: value > 0)
    _check_number("scale", group["scale"], "a positive number", lambda value: value > 0)
    _check_number("momentum", group["momentum"], "a number from 0 up to but not 1", lambda value: 0 <= value < 1)
    _check_number("weight_decay", group["weight_decay"], "a number that is not negative", lambda value: value >= 0)


def check_clip(clip: float | None) -> None:
    """Refuse a bound on the update that is not a positive number."""
    if clip is not None:
        _check_number("clip", clip, "a positive number or None", lambda value: value > 0)


def check_warmup(warmup: Optimizer | None, steps: int, params: Sequence[Tensor]) -> None:
    """Refuse a warm-up that does not move the same parameters for a number of steps."""
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"warmup_steps is {steps!r}: pass an integer that is not negative.")
    if warmup is None:
        if steps:
            raise ValueError(
                f"warmup_steps is {steps} but warmup is None: pass the optimizer that warms up, such as "
                "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)."
            )
        return
    if not isinstance(warmup, Optimizer):
        raise TypeError(f"warmup is a {type(warmup).__name__}: pass a torch.optim.Optimizer.")
    theirs = {id(p) for group in warmup.param_groups for p in group["params"] if p.requires_grad}
    if theirs != {id(p) for p in params}:
        raise ValueError("warmup moves other parameters than the preconditioner: build both over the same parameters.")


def check_factors(layers: Sequence[Layer], saved: Mapping[str, Mapping[str, Tensor]], ownership: Ownership) -> None:
    """Refuse a checkpoint without the factors of ``layers`` (those kept by this process at least) in their shapes."""
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


def _check_number(name: str, value: Any, expected: str, fits: Any) -> None:
    if not isinstance(value, Real):
        raise TypeError(f"{name} is a {type(value).__name__}: pass {expected}.")
    if not isfinite(value) or not fits(value):
        raise ValueError(f"{name} is {value}: pass {expected}.")
