"""What both front doors ask of their arguments before anything is built: slips of the pen get a sentence each."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from apo.errors import ApoWarning
from apo.rules.base import Rule

__all__ = ["check_arguments", "check_criterion", "is_loss_of_torch", "under_old_name"]


def check_arguments(
    door: str, optimizer: Any, model: Any, criterion: Any, scaler: Any, cuda_graph: Any, save_batch: Any
) -> None:
    """Raise unless the arguments have the right types and are in the right order.

    Args:
        door: How the user spelled the call, for messages.
        optimizer: See :class:`apo.Tuner`, as all others.
        model: The network.
        criterion: The loss function.
        scaler: The ``GradScaler``.
        cuda_graph: Whether to capture CUDA graphs.
        save_batch: Whether files hold the batch B'.
    """
    _check_order(door, optimizer, model, criterion)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_criterion(criterion)
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {scaler!r}")
    for name, value in (("cuda_graph", cuda_graph), ("save_batch", save_batch)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def _check_order(door: str, optimizer: Any, model: Any, criterion: Any) -> None:
    """Raise if the arguments would fit in another order."""
    given = ", ".join(type(argument).__name__ for argument in (optimizer, model, criterion) if argument is not None)
    swapped = TypeError(f"arguments must be in the order {door}(optimizer, model, criterion), got {given}: swap them")
    if any(isinstance(argument, (Optimizer, Rule)) for argument in (model, criterion)):
        raise swapped
    if isinstance(model, nn.Module) and isinstance(criterion, nn.Module) and isinstance(optimizer, (Optimizer, Rule)):
        moved = optimizer.optimizer if isinstance(optimizer, Rule) else optimizer
        ids = {id(p) for group in moved.param_groups for p in group["params"]}
        in_model, in_criterion = (any(id(p) in ids for p in part.parameters()) for part in (model, criterion))
        if in_criterion and not in_model and next(model.parameters(), None) is None:
            raise swapped


def check_criterion(criterion: Any) -> None:
    """Raise if this is no loss function but the class of one, or nothing that can be called."""
    if isinstance(criterion, type):
        name = criterion.__name__
        raise TypeError(f"criterion must be a loss, got the class itself, {name}: write {name}()")
    if criterion is not None and not callable(criterion):
        raise TypeError(
            f"criterion must be callable as criterion(output, target) or None, got {type(criterion).__name__}"
        )


def under_old_name(criterion: Any, loss: Any) -> Any:
    """Return the criterion, which 0.1 called ``loss``; that name is accepted for one release."""
    if loss is None:
        return criterion
    if criterion is not None:
        raise TypeError("criterion and loss are two names of one argument: pass criterion alone")
    warnings.warn("loss= is called criterion= now; the old name will be removed", ApoWarning, stacklevel=5)
    return loss


def is_loss_of_torch(criterion: Any) -> bool:
    """Return whether this is one of torch's losses, all of which are meant to be minimised.

    Example:
        >>> is_loss_of_torch(nn.MSELoss()), is_loss_of_torch(functional.l1_loss), is_loss_of_torch(max)
        (True, True, False)
    """
    if isinstance(criterion, nn.Module):
        return type(criterion).__module__ == nn.MSELoss.__module__
    return criterion is getattr(functional, getattr(criterion, "__name__", ""), None) and criterion is not None
