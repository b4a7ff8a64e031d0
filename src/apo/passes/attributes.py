"""State that a network keeps in plain attributes, such as the hidden state of a recurrent one: ``self.h = h.detach()``.

Buffers are the place for such state, but many networks have it in attributes, and every pass moves it. A pass that is
run again has to start from the state that the training pass started from, and afterwards everything must be as the
training pass left it.

Attributes are put back by reference. Those that may be changed in place, small tensors and containers, are copied as
well. Modules of torch itself, wrappers for data parallelism among them, keep no such state, only their own affairs.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from apo.errors import ReplayError
from apo.torch_internals import version_of

__all__ = ["PlainAttributes"]

#: What every module has: registries, hooks and the training mode, which is put back elsewhere.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
#: Larger tensors and containers are not copied on suspicion.
_LARGEST = 2**20
_CONTAINERS = (list, dict, set, deque)


class PlainAttributes:
    """The plain attributes of some modules at one moment.

    Args:
        modules: The modules, each once.

    Example:
        >>> class Counter(nn.Module):
        ...     passes = 0
        ...
        ...     def forward(self, x):
        ...         self.passes += 1
        ...         return x
        >>> counter = Counter()
        >>> before = PlainAttributes([counter])
        >>> _ = counter(torch.zeros(1))
        >>> counter.passes, before.restore(), counter.passes
        (1, None, 0)
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []  # containers, each with a copy
        self._tensors: list[tuple[str, Tensor, Tensor | None, int]] = []  # with a copy of the values, and the version
        for module in modules:
            if not _may_keep_state(type(module)):
                continue
            own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
            self._attributes.append((module, own))
            for name, value in own.items():
                self._keep_contents(f"{type(module).__name__}.{name}", value)

    def _keep_contents(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            copied = value.detach().clone() if value.numel() <= _LARGEST else None
            self._tensors.append((name, value, copied, version_of(value)))
        elif type(value) in _CONTAINERS and len(value) <= _LARGEST:
            self._contents.append((value, value.copy()))
            for inside in value.values() if isinstance(value, dict) else value:
                if isinstance(inside, Tensor):
                    self._keep_contents(name, inside)

    def restore(self) -> None:
        """Put everything back.

        Raises:
            ReplayError: A tensor too large to be copied on suspicion was changed in place.
        """
        for module, saved in self._attributes:
            own = vars(module)
            for name in own.keys() - saved.keys() - _OF_EVERY_MODULE:
                del own[name]
            for name, value in saved.items():
                if own.get(name, own) is not value:
                    own[name] = value
        for container, contents in self._contents:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(contents)
        for name, tensor, values, version in self._tensors:
            if version_of(tensor) != version:
                self._write(name, tensor, values)

    @torch.no_grad()
    def _write(self, name: str, tensor: Tensor, values: Tensor | None) -> None:
        if values is None:
            raise ReplayError(
                f"{name} must be a buffer if the network changes it in place, got a plain attribute of "
                f"{tuple(tensor.shape)}: use register_buffer"
            )
        tensor.copy_(values)


@functools.lru_cache  # every pass of a meta-step asks for every module
def _may_keep_state(kind: type[nn.Module]) -> bool:
    modules = (base for base in kind.__mro__ if issubclass(base, nn.Module))
    return not all(base.__module__.split(".")[0] == "torch" for base in modules)
