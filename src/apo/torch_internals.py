"""Every private name of torch that apo uses, once: the file to open when a new release of torch breaks something.

Checked on torch 2.4, 2.11 and 2.13. Public ways to the same end are named where torch has one that is not good enough.
Most entries are torch's own objects under another name, so that using them costs nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = [
    "active_data_parallel_wrapper", "defers_gradient_reduction", "foreach_add", "foreach_add_", "foreach_copy_",
    "foreach_div", "foreach_div_", "foreach_mul", "foreach_mul_", "foreach_norm", "foreach_sqrt", "foreach_sub",
    "forward_hooks", "forward_pre_hooks", "functorch_transform", "is_scripted", "is_wrapped_by_scheduler",
    "optimizer_hook_runner", "own_buffers", "own_modules", "own_parameters", "step_post_hooks", "step_pre_hooks",
    "uncompiled", "version_of", "will_reach", "without_compile_prefix", "without_torch_function",
]  # fmt: skip

# One launch for a list of tensors. torch's optimizers are written in these; there is no public form.
foreach_add: Callable[..., list[Tensor]] = torch._foreach_add  # pyright: ignore
foreach_add_: Callable[..., None] = torch._foreach_add_  # pyright: ignore
foreach_copy_: Callable[..., None] = torch._foreach_copy_  # pyright: ignore
foreach_div: Callable[..., list[Tensor]] = torch._foreach_div  # pyright: ignore
foreach_div_: Callable[..., None] = torch._foreach_div_  # pyright: ignore
foreach_mul: Callable[..., list[Tensor]] = torch._foreach_mul  # pyright: ignore
foreach_mul_: Callable[..., None] = torch._foreach_mul_  # pyright: ignore
foreach_norm: Callable[..., list[Tensor]] = torch._foreach_norm  # pyright: ignore
foreach_sqrt: Callable[..., list[Tensor]] = torch._foreach_sqrt  # pyright: ignore
foreach_sub: Callable[..., list[Tensor]] = torch._foreach_sub  # pyright: ignore

#: How often a tensor was changed in place, the counter that autograd checks saved tensors with.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")

# A module's own registries. The public iterators pass each entry through one generator per level of the network,
# which more than doubles the time of a walk, and cannot exchange an entry.
own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")

# The hooks around a module's forward pass, by handle. There is no public way to ask whether there are any.
forward_hooks: Callable[[nn.Module], dict[int, Callable]] = operator.attrgetter("_forward_hooks")
forward_pre_hooks: Callable[[nn.Module], dict[int, Callable]] = operator.attrgetter("_forward_pre_hooks")

# The hooks around an optimizer's step, by handle, in the order in which they run. Only the dictionaries have an order
# that can be changed.
step_pre_hooks: Callable[[Optimizer], dict[int, Callable]] = operator.attrgetter("_optimizer_step_pre_hooks")
step_post_hooks: Callable[[Optimizer], dict[int, Callable]] = operator.attrgetter("_optimizer_step_post_hooks")

#: The code of the function that runs the hooks, the same for all optimizers.
optimizer_hook_runner = getattr(Optimizer.profile_hook_step(lambda: None), "__code__", None)

#: The innermost transform of ``torch.func`` (``grad``, ``vmap``, ...) that is at work, or None.
functorch_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # pyright: ignore

#: Whether the backward pass that runs now will reach a node of the graph. It raises a RuntimeError for the node of a
#: tensor for which ``torch.autograd.grad`` was asked.
will_reach: Callable[[Any], bool] = torch._C._will_engine_execute_node

#: A context in which ``__torch_function__`` of subclasses is not called; the default of Tensor is written with it.
without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass


def is_wrapped_by_scheduler(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step`` has the mark that torch's schedulers leave on the optimizers they serve."""
    step = optimizer.step
    return hasattr(step, "_wrapped_by_lr_sched") or hasattr(step, "_with_counter")  # the second until torch 2.4


def is_scripted(module: nn.Module) -> bool:
    """Return whether ``torch.jit.script`` made a module; those of ``torch.jit.trace`` are of a class beside it."""
    return isinstance(module, torch.jit.RecursiveScriptModule)  # pyright: ignore


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the network inside what ``torch.compile`` made of it; any other module as it is."""
    return getattr(module, "_orig_mod", module)


def without_compile_prefix(name: str) -> str:
    """Return a module's dotted name without the wrapper that ``torch.compile`` puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def active_data_parallel_wrapper() -> nn.parallel.DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` that runs its module now; nothing public leads from module to wrapper."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def defers_gradient_reduction(module: Any) -> bool:
    """Return whether a module under ``fully_shard`` keeps its gradients to itself for now; the setter has no reader."""
    state = module._get_fsdp_state()
    # One group until torch 2.12, then several.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return not all(getattr(group, "reduce_grads", True) for group in groups)
