"""Nested tuples, lists and mappings of tensors: what networks and criteria take and return."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["odd_type", "tree_map"]

#: What ``torch.load(weights_only=True)`` accepts, beside tensors and containers.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def tree_map(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply ``function`` to every tensor in nested tuples, lists and mappings; keep everything else."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        # Not through the constructor: that of a PackedSequence takes other arguments than its fields.
        return type(tree)._make(tree_map(function, item) for item in tree)  # type: ignore[attr-defined]
    if isinstance(tree, (tuple, list)):
        return type(tree)(tree_map(function, item) for item in tree)
    if isinstance(tree, Mapping):
        return _mapping_like(tree, {key: tree_map(function, value) for key, value in tree.items()})
    return tree


def _mapping_like(pattern: Mapping, items: dict) -> Mapping:
    """Return a mapping of the pattern's type with other values under its keys, or a plain dict if there is no way."""
    if type(pattern) is dict or not isinstance(pattern, (dict, UserDict)):
        return items  # a copy of any other kind of mapping might share its memory with the pattern
    try:
        twin = copy.copy(pattern)
        for key, value in items.items():
            twin[key] = value
            if key in vars(twin):  # where entries are attributes as well
                vars(twin)[key] = value
    except Exception:  # a type that cannot be copied or written to
        return items
    return twin


def odd_type(tree: Any) -> type | None:
    """Return the type of something that ``torch.load(weights_only=True)`` would refuse, or None if all is plain data.

    Example:
        >>> odd_type({"a": (1, [torch.zeros(2)])}), odd_type([range(3)])
        (None, <class 'range'>)
    """
    kind = type(tree)
    if kind in _PLAIN or kind in (Tensor, nn.Parameter):
        return None
    if kind in (tuple, list):
        inside = tree
    elif kind in (dict, OrderedDict):
        inside = [*tree.keys(), *tree.values()]
    else:
        return kind
    return next((odd for item in inside if (odd := odd_type(item)) is not None), None)
