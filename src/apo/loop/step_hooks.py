"""How torch runs the hooks around an optimizer's step, and what that asks of ours.

* A *closure* runs inside the step, after the hooks before it: whoever reads the learning rate in there, or breaks off
  with an error, shall find the optimizer as it is outside a step.
* A *subclass* whose ``step`` calls ``super().step()`` may run all hooks twice, the inner time for the same step.
* *Other people's hooks* shall see what a step did in the end, not what we measured on the way: ours come last before
  the step and first after it.
* A *fused* optimizer leaves it to its step to unscale the gradients of a GradScaler.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

__all__ = ["is_inner_step", "run_first", "run_last", "unscale_fused", "with_closure"]

#: The code of the function that runs the hooks, the same for all optimizers.
_RUNS_HOOKS = getattr(Optimizer.profile_hook_step(lambda: None), "__code__", None)


def with_closure(
    args: tuple, kwargs: dict[str, Any], wrap: Callable[[Any], Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Return the arguments of a step with its closure wrapped, or None if it has no closure.

    Args:
        args: Positional arguments, the optimizer first.
        kwargs: Keyword arguments.
        wrap: Makes a closure from a closure.

    Example:
        >>> args, kwargs = with_closure(("optimizer", lambda: 2), {}, lambda closure: lambda: closure() + 1)
        >>> args[1]()
        3
    """
    if len(args) > 1 and callable(args[1]):
        return (args[0], wrap(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    return None


def is_inner_step(optimizer: Optimizer) -> bool:
    """Tell, from within a hook, whether the step is a part of another step of the same optimizer."""
    if not _extends_a_step(type(optimizer)):
        return False
    frame, steps = sys._getframe(1), 0
    while frame is not None:
        steps += frame.f_code is _RUNS_HOOKS and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


@functools.lru_cache  # every step asks
def _extends_a_step(kind: type) -> bool:
    """Tell whether a class has a ``step`` of its own above one that it inherits."""
    steps = {inspect.unwrap(base.__dict__["step"]) for base in kind.__mro__ if "step" in base.__dict__}
    return len(steps - {Optimizer.step}) > 1


def run_last(hooks: dict[int, Any], handle: RemovableHandle) -> None:
    """Have a hook run after all others of its kind; not to be called while these run."""
    if next(reversed(hooks), None) != handle.id:
        hooks[handle.id] = hooks.pop(handle.id)


def run_first(hooks: dict[int, Any], handle: RemovableHandle) -> None:
    """Have a hook run before all others of its kind; not to be called while these run.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> one = optimizer.register_step_post_hook(lambda *_: print("one"))
        >>> two = optimizer.register_step_post_hook(lambda *_: print("two"))
        >>> run_first(optimizer._optimizer_step_post_hooks, two)
        >>> optimizer.step()
        two
        one
    """
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)


def unscale_fused(optimizer: Optimizer) -> bool:
    """Unscale the gradients that a GradScaler leaves to a fused optimizer.

    Returns:
        Whether the scaler found an overflow, so that the optimizer will not step and neither may we.
    """
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return False
    found = getattr(optimizer, "found_inf", None)
    if found is not None and bool(found):
        return True
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    with torch.no_grad():
        for gradient in gradients:
            gradient.div_(scale.to(gradient.device))
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    return False
