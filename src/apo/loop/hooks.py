"""Hooks on other people's objects that come off again and that copies of those objects do not inherit."""

from __future__ import annotations

import weakref
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
        # A compiler that traced into a hook would make its effects part of a graph.
        self._untraced = None if function is None else torch.compiler.disable(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Without a compiler at work the detour would cost as much as all else that a hook does on an ordinary step.
        function = self._untraced if torch.compiler.is_compiling() else self._function
        return None if function is None else function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple:
        return _Hook, ()


class Hooks:
    """The hooks of one tuner.

    Example:
        >>> import torch
        >>> hooks, layer = Hooks(), torch.nn.Linear(1, 1)
        >>> handle = hooks.add(layer.register_forward_pre_hook, lambda module, args: print("called"))
        >>> _ = layer(torch.zeros(1, 1))
        called
        >>> hooks.remove()
        >>> _ = layer(torch.zeros(1, 1))
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles).atexit = False

    def add(
        self, register: Callable[..., RemovableHandle], function: Callable[..., Any], weak: bool = False, **options: Any
    ) -> RemovableHandle:
        """Register a hook through a ``register_*_hook`` method.

        Args:
            register: The method.
            function: What to call.
            weak: Whether the hook of a method shall not keep its object alive; it comes off when the object is gone.
            **options: Passed on.
        """
        self._handles.append(register(_Hook(_weakly(function) if weak else function), **options))
        return self._handles[-1]

    def remove(self) -> None:
        """Take all hooks off."""
        _remove(self._handles)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call a method for as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args, **kwargs)

    return call


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
