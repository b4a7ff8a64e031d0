"""Check that an optimizer moves the network that it is attached to."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["check_ownership"]


def check_ownership(optimizer: Any, model: nn.Module, criterion: Any) -> None:
    """Raise if none of the optimizer's parameters belongs to the network or to the criterion.

    Then no step changes what the look-ahead sees, and nothing could be learned. A part is enough: adapters on a frozen
    network, or a learnable weight of the loss beside it. Wrappers for data parallelism and compilation and
    parametrizations list the parameters that an optimizer holds as their own.

    Args:
        optimizer: An optimizer or a rule around one; anything else is not judged here.
        model: The network.
        criterion: The loss function.

    Raises:
        ValueError: None does.
    """
    groups = getattr(getattr(optimizer, "optimizer", optimizer), "param_groups", [])
    held = [p for group in groups for p in group["params"]]
    modules = [module for module in (model, criterion) if isinstance(module, nn.Module)]
    if held and {id(p) for module in modules for p in module.parameters()}.isdisjoint(id(p) for p in held):
        raise ValueError(
            f"optimizer must hold parameters of the model, got {len(held)} tensors that are not among the parameters "
            f"of {type(model).__name__}: build it from model.parameters(), or pass the network that it trains "
            "(functional_call on other tensors hides them: train the network's own parameters)"
        )
