"""What both front doors ask of their arguments before anything is built: slips of the pen get a sentence each."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from apo.errors import ApoWarning
from apo.loop.hooks import own_hooks
from apo.rules.base import Rule
from apo.torch_internals import is_scripted

__all__ = ["check_arguments", "warn_of_maximising"]


def check_arguments(
    door: str,
    optimizer: Any,
    model: Any,
    criterion: Any,
    scaler: Any,
    cuda_graph: Any,
    on_nonfinite: Any,
    save_batch: Any,
) -> None:
    """Raise unless the arguments have the right types, are in the right order and belong together.

    If none of the optimizer's parameters is the network's or the criterion's, no step changes what the look-ahead sees,
    and nothing could be learned. A part is enough: adapters on a frozen network, or a learnable weight of the loss
    beside it. Wrappers for data parallelism and compilation and parametrizations list the parameters that an optimizer
    holds as their own.

    ``door`` is how the user spelled the call, for messages. What is neither optimizer nor rule is not judged here.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    held = {id(p) for group in getattr(inner, "param_groups", []) for p in group["params"]}
    in_model, in_criterion = (
        isinstance(part, nn.Module) and not held.isdisjoint(id(p) for p in part.parameters())
        for part in (model, criterion)
    )
    empty = isinstance(model, nn.Module) and next(model.parameters(), None) is None
    if (empty and in_criterion) or any(isinstance(argument, (Optimizer, Rule)) for argument in (model, criterion)):
        given = ", ".join(type(argument).__name__ for argument in (optimizer, model, criterion) if argument is not None)
        raise TypeError(f"arguments must be in the order {door}(optimizer, model, criterion), got {given}: swap them")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if type(model) in (nn.ModuleList, nn.ModuleDict):
        raise TypeError(
            f"model must be a module that the loop calls, got a {type(model).__name__}, which has no forward: write a "
            "module that calls its parts in forward, and call that one"
        )
    if is_scripted(model):
        raise TypeError(
            "model must be a module that can be watched, got a scripted one: train the module itself, or "
            "torch.compile(model), and call torch.jit.script on a copy for export"
        )
    if isinstance(criterion, type):
        name = criterion.__name__
        raise TypeError(f"criterion must be a loss, got the class itself, {name}: write {name}()")
    if criterion is not None and not callable(criterion):
        raise TypeError(
            f"criterion must be callable as criterion(output, target) or None, got {type(criterion).__name__}"
        )
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {scaler!r}")
    for name, value in (("cuda_graph", cuda_graph), ("save_batch", save_batch)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    if on_nonfinite not in ("raise", "skip"):
        raise ValueError(f"on_nonfinite must be 'raise' or 'skip', got {on_nonfinite!r}: 'skip' leaves steps out")
    hooked = optimizer.optimizer if isinstance(optimizer, Rule) else optimizer
    if held and own_hooks(vars(hooked)):  # a second tuner would take the first one's steps for the optimizer's own
        raise ValueError("optimizer already has a tuner: use that one, or call its detach() before building another")
    if held and not (in_model or in_criterion):
        raise ValueError(
            f"optimizer must hold parameters of the model, got {len(held)} tensors that are not among the parameters "
            f"of {type(model).__name__}: build it from model.parameters(), or pass the network that it trains "
            "(functional_call on other tensors hides them: train the network's own parameters)"
        )


def warn_of_maximising(criterion: object, weights: Sequence[Tensor | float]) -> None:
    """Say that a loss of torch is made larger, which nobody means; a negative weight may turn others into a loss."""
    if isinstance(criterion, nn.Module):
        of_torch = type(criterion).__module__ == nn.MSELoss.__module__
    else:
        of_torch = callable(criterion) and criterion is getattr(functional, getattr(criterion, "__name__", ""), None)
    if of_torch and any(float(weight.sum() if isinstance(weight, Tensor) else weight) < 0 for weight in weights):
        warnings.warn(
            "criterion must be minimised, got a negative weight in front of it: the learned rate is the one that "
            "makes the loss larger; back-propagate the loss itself, or detach() apo if that is what you want",
            ApoWarning,
            stacklevel=3,
        )
