"""Hooks on other people's objects that come off again and that copies of those objects do not inherit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["Hooks"]


class _Hook:
    """A hook whose copies do nothing.

    ``copy.deepcopy(model)``, for an average of the weights say, copies the module's hooks. A copied bound method would
    drag a copy of the tuner and of the optimizer along, and would record forward passes of the wrong network.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._function is None else self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple:
        return _Hook, ()


class Hooks:
    """The hooks of one tuner.

    Example:
        >>> import torch
        >>> hooks, layer = Hooks(), torch.nn.Linear(1, 1)
        >>> hooks.add(layer.register_forward_pre_hook, lambda module, args: print("called"))
        >>> _ = layer(torch.zeros(1, 1))
        called
        >>> hooks.remove()
        >>> _ = layer(torch.zeros(1, 1))
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def add(self, register: Callable[..., RemovableHandle], function: Callable[..., Any], **options: Any) -> None:
        """Register a hook through a ``register_*_hook`` method."""
        # A compiler that traced into a hook would make its effects part of a graph.
        self._handles.append(register(_Hook(torch.compiler.disable(function)), **options))

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
