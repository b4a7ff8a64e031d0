"""Optimizer states as plain data, if torch's own ``state_dict`` is not enough.

Some optimizers keep objects or strings in their state: ``torch.load(weights_only=True)`` cannot read objects, and
strings send torch's ``load_state_dict`` into an endless recursion. Here an object is saved as the tensors it holds, and
loaded into the object that the optimizer creates again; everything else is saved unchanged, without casts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.passes.recording import tree_map

_OBJECT = "tensors of an object"


def plain_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return all param groups and states, with tensors shared."""
    return {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        "states": [
            {key: _encode(value) for key, value in optimizer.state[p].items()} if p in optimizer.state else None
            for p in _parameters(optimizer)
        ],
    }


def load_plain_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Take back what :func:`plain_state` returned."""
    parameters, states = _parameters(optimizer), state["states"]
    if len(parameters) != len(states):
        raise ValueError(f"state has {len(states)} parameters, the optimizer {len(parameters)}: build it as it was")
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(copied_to(saved, group["params"][0].device))
    if any(_is_object(value) for saved in states for value in (saved or {}).values()):
        # The optimizer creates the states of the parameters that had one, from gradients of their shapes.
        for p, saved in zip(parameters, states, strict=True):
            p.grad = None if saved is None else torch.zeros_like(p)
        for group in optimizer.param_groups:
            optimizer.init_group(group)  # type: ignore[attr-defined]
        optimizer.zero_grad()
    for p, saved in zip(parameters, states, strict=True):
        for key, value in (saved or {}).items():
            if _is_object(value):
                vars(optimizer.state[p][key]).update(copied_to(value[_OBJECT], p.device))
            else:
                optimizer.state[p][key] = copied_to(value, p.device)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, (Tensor, bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_encode(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    lists = {name: item if isinstance(item, list) else [item] for name, item in vars(value).items()}
    tensors = [name for name, items in lists.items() if items and all(isinstance(item, Tensor) for item in items)]
    return {_OBJECT: {name: vars(value)[name] for name in tensors}}


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping) and _OBJECT in value


def copied_to(value: Any, device: torch.device) -> Any:
    """Copy tensors to the device, in their own precision."""
    return tree_map(lambda tensor: tensor.to(device).clone(), value)
