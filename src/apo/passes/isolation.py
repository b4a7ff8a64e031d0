"""Keep a meta-step from leaving traces: buffers, plain attributes, gradients, random streams and module modes.

A forward pass in training mode moves BatchNorm's running statistics and draws dropout masks from the random stream; a
backward pass fills ``.grad``. A meta-step does both several times, and afterwards everything must be as an ordinary
step would have left it.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apo.distributed import are_several
from apo.errors import ReplayError
from apo.torch_internals import (
    forward_hooks,
    forward_pre_hooks,
    own_buffers,
    own_modules,
    own_parameters,
    version_of,
)
from apo.vectors import assign_, copies

__all__ = ["PassState", "PlainAttributes", "RandomState", "Surface", "every_module", "place_of"]

#: What every module has: registries, hooks and the training mode, which is put back elsewhere.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
#: Larger tensors and containers are not copied as a precaution.
_LARGEST = 2**20
_CONTAINERS = (list, dict, set, deque)


def every_module(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules and all inside them, each once.

    Example:
        >>> inside = nn.Linear(1, 1)
        >>> len(every_module([nn.Sequential(inside, nn.Sequential(inside))]))
        3
    """
    found = {id(root): root for root in roots}
    waiting = list(found.values())
    while waiting:
        for child in own_modules(waiting.pop()).values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


@dataclass(frozen=True)
class RandomState:
    """The state of the random streams: torch's on the CPU and on some CUDA devices, Python's and NumPy's global ones.

    None marks a stream that is left alone: NumPy's, if nobody has imported it, and both of the host's where the
    network is known not to draw from them. Reading and writing them takes longer than a small layer.
    """

    cpu: Tensor
    cuda: dict[int, Tensor]
    python: tuple | None = None
    numpy: dict[str, Any] | None = None

    @classmethod
    def capture(cls, devices: Iterable[torch.device], host: bool = True) -> RandomState:
        """Read torch's streams of the CPU and of the CUDA devices among ``devices``, and the host's if asked to."""
        cuda: dict[int, Tensor] = {}
        for device in devices:
            if device.type == "cuda":
                index = device.index or 0
                cuda[index] = torch.cuda.get_rng_state(index)
        python, numpy = _host_streams() if host else (None, None)
        return cls(torch.get_rng_state(), cuda, python, numpy)

    @property
    def has_host(self) -> bool:
        """Whether Python's stream is part of it, and NumPy's, if that is imported."""
        return self.python is not None

    def trimmed(self) -> RandomState:
        """Return it without the host's streams if these have not moved since: nothing has drawn from them."""
        if not self.has_host:
            return self
        python, numpy = _host_streams()
        unmoved = python == self.python and _arrays_as("tobytes", numpy) == _arrays_as("tobytes", self.numpy)
        return RandomState(self.cpu, self.cuda) if unmoved else self

    def restore(self) -> None:
        """Set the streams back to this state."""
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        if self.python is not None:
            random.setstate(self.python)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None and self.numpy is not None:
            numpy.set_state(self.numpy)

    def state_dict(self) -> dict[str, object]:
        """Return plain data that ``torch.load(weights_only=True)`` accepts."""
        # NumPy's generator accepts lists in place of arrays.
        numpy = _arrays_as("tolist", self.numpy)
        return {"cpu": self.cpu, "cuda": dict(self.cuda), "python": self.python, "numpy": numpy}

    @classmethod
    def from_state_dict(cls, state: dict) -> RandomState:
        """Read back what :meth:`state_dict` returned."""
        cuda = {int(index): value.cpu() for index, value in state["cuda"].items()}
        return cls(state["cpu"].cpu(), cuda, state.get("python"), state.get("numpy"))


class PlainAttributes:
    """The plain attributes of some modules at one moment, such as the hidden state ``self.h = h.detach()``.

    Such state belongs in buffers, but many networks keep it in attributes, and every pass changes it. A pass that is
    run again has to start from the state that the training pass started from, and afterwards everything must be as the
    training pass left it.

    Attributes are put back by reference. Those that may be changed in place, small tensors and containers, are copied
    as well. Torch's own modules, including data-parallel wrappers, keep no such state.

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
            ReplayError: A tensor that is too large to be copied as a precaution was changed in place.
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
            if version_of(tensor) == version:
                continue
            if values is None:
                raise ReplayError(
                    f"{name} must be a buffer if the network changes it in place, got a plain attribute of "
                    f"{tuple(tensor.shape)}: use register_buffer"
                )
            with torch.no_grad():
                tensor.copy_(values)


@dataclass(frozen=True)
class PassState:
    """What a pass of a network starts from: random streams, and what the modules keep in plain attributes."""

    random: RandomState
    attributes: PlainAttributes

    @classmethod
    def capture(cls, modules: Sequence[nn.Module]) -> PassState:
        """Note what a pass of some modules, each once, starts from now."""
        devices = {p.device for module in modules for p in own_parameters(module).values() if p is not None}
        return cls(RandomState.capture(devices, any(map(_may_draw_from_host, modules))), PlainAttributes(modules))

    def restore(self) -> None:
        """Let the next pass start from here."""
        self.random.restore()
        self.attributes.restore()


def place_of(parameters: Iterable[Tensor]) -> tuple:
    """Return a value that changes if one of the weights does. It does not read them, so no device is waited for.

    A change of ``p.data`` in place goes unnoticed; another tensor assigned to it does not.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> before = place_of([weight])
        >>> with torch.no_grad():
        ...     _ = weight.add_(0.1).sub_(0.1)
        >>> before == place_of([weight]), place_of([weight]) == place_of([weight])
        (False, True)
    """
    # Tensors of other classes, such as DTensors, need not have memory of their own.
    return tuple([(version_of(p), p.data_ptr() if type(p) is nn.Parameter else 0) for p in parameters])


class Surface:
    """Everything that a pass of some modules may touch; found once, because walking a network costs time.

    Args:
        modules: The network and, if it is a module, the criterion.
        parameters: Parameters to protect beside those of the modules (the optimizer's own).
        draws_from_host: Whether the passes may draw random numbers from Python or NumPy.
    """

    def __init__(
        self, modules: Iterable[nn.Module], parameters: Iterable[Tensor], draws_from_host: bool = True
    ) -> None:
        self._owners = every_module(modules)
        tensors = {id(p): p for owner in self._owners for p in own_parameters(owner).values() if p is not None}
        tensors |= {id(p): p for p in parameters}
        self._parameters = list(tensors.values())
        self._draws_from_host = draws_from_host
        self._devices = {p.device for p in self._parameters}
        # Gradients that lie in the buckets of DistributedDataParallel are overwritten by its next pass.
        averaged = (o for o in self._owners if isinstance(o, nn.parallel.DistributedDataParallel))
        self._overwrites_gradients = are_several() and any(owner.gradient_as_bucket_view for owner in averaged)

    @contextmanager
    def undisturbed(self, modes: Iterable[tuple[nn.Module, bool]] = ()) -> Iterator[None]:
        """Restore buffers, plain attributes, ``.grad``, modes and random streams of everything involved on leaving.

        Inside, every ``.grad`` is ``None``: a backward pass starts from a clean slate.

        Args:
            modes: Modules, each with whether it is in training mode inside.
        """
        owners, parameters = self._owners, self._parameters
        places = [(own, name, b) for own in map(own_buffers, owners) for name, b in own.items() if b is not None]
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}  # those of one kind are copied together
        for _, _, buffer in places:
            if not _is_expanded(buffer):  # torch refuses to write into those; they are put back as they are
                kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        values = [(buffers, copies(buffers)) for buffers in kinds.values()]
        modes_now = [owner.training for owner in owners]
        gradients = [p.grad for p in parameters]
        if self._overwrites_gradients:
            gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        state = self.state()
        for parameter in parameters:
            parameter.grad = None
        _set_modes(modes)
        try:
            yield
        finally:
            for buffers, copied in values:
                assign_(buffers, copied)
            for own, name, buffer in places:
                own[name] = buffer
            _set_modes(zip(owners, modes_now, strict=True))
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            state.restore()

    def state(self) -> PassState:
        """Note what a pass that starts now starts from."""
        return PassState(RandomState.capture(self._devices, self._draws_from_host), PlainAttributes(self._owners))


def _set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training != training:  # setting an attribute of a module is slow
            module.training = training


@functools.lru_cache  # every pass of a meta-step asks for every module
def _may_keep_state(kind: type[nn.Module]) -> bool:
    modules = (base for base in kind.__mro__ if issubclass(base, nn.Module))
    return not all(base.__module__.split(".")[0] == "torch" for base in modules)


def _may_draw_from_host(module: nn.Module) -> bool:
    """Return whether running a module may draw from Python's or NumPy's stream: torch's own modules do not."""
    if _may_keep_state(type(module)) or "forward" in vars(module):
        return True
    hooks = [*forward_hooks(module).values(), *forward_pre_hooks(module).values()]
    return not all(type(hook).__module__.startswith(("torch.", "apo.")) for hook in hooks)


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether elements share memory, as ``expand`` makes them."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _host_streams() -> tuple[tuple, dict[str, Any] | None]:
    # NumPy's stream matters only if somebody has imported it; apo does not.
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state(legacy=False)


def _arrays_as(method: str, tree: Any) -> Any:
    """Turn the arrays in a state of NumPy's generator into plain values, by one of their methods."""
    if isinstance(tree, dict):
        return {key: _arrays_as(method, value) for key, value in tree.items()}
    return getattr(tree, method)() if hasattr(tree, method) else tree
