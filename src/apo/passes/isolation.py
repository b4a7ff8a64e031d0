"""Keep a meta-step from leaving traces: buffers, plain attributes, gradients, random streams and module modes.

A forward pass in training mode moves BatchNorm's running statistics and draws dropout masks from the random stream; a
backward pass fills ``.grad``. A meta-step does both several times, and afterwards everything must be as an ordinary
step would have left it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from apo.passes.attributes import PlainAttributes
from apo.torch_internals import own_buffers, own_modules, own_parameters
from apo.vectors import assign_, copies

__all__ = ["RandomState", "Surface", "devices_of", "every_module"]


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


def devices_of(model: nn.Module) -> set[torch.device]:
    """Return the devices that hold parameters of a network.

    Example:
        >>> devices_of(nn.Linear(1, 1))
        {device(type='cpu')}
    """
    owners = every_module([model])
    return {p.device for owner in owners for p in own_parameters(owner).values() if p is not None}


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
        indices = {device.index or 0 for device in devices if device.type == "cuda"}
        cuda = {index: torch.cuda.get_rng_state(index) for index in sorted(indices)}
        return cls(torch.get_rng_state(), cuda, *(_host_streams() if host else (None, None)))

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
        return replace(self, python=None, numpy=None) if unmoved else self

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
        self.devices = {p.device for p in self._parameters}

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restore buffers, plain attributes, ``.grad``, modes and random streams of everything involved on leaving.

        Inside, every ``.grad`` is ``None``: a backward pass starts from a clean slate.
        """
        owners, parameters = self._owners, self._parameters
        places = [(own, name, b) for own in map(own_buffers, owners) for name, b in own.items() if b is not None]
        # torch refuses to write into a buffer whose elements share memory, so those are put back as they are.
        values = _Snapshot([buffer for _, _, buffer in places if not _is_expanded(buffer)])
        modes = [owner.training for owner in owners]
        attributes = self.attributes()
        gradients = self._gradients()
        random_state = RandomState.capture(self.devices, self._draws_from_host)
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            values.restore()
            for own, name, buffer in places:
                own[name] = buffer
            attributes.restore()
            for owner, training in zip(owners, modes, strict=True):
                if owner.training != training:
                    owner.training = training
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            random_state.restore()

    def attributes(self) -> PlainAttributes:
        """Note what the modules keep in plain attributes."""
        return PlainAttributes(self._owners)

    def _gradients(self) -> list[Tensor | None]:
        gradients = [p.grad for p in self._parameters]
        # Gradients that lie in the buckets of DistributedDataParallel are overwritten by its next pass.
        if any(isinstance(o, nn.parallel.DistributedDataParallel) and o.gradient_as_bucket_view for o in self._owners):
            return [None if gradient is None else gradient.clone() for gradient in gradients]
        return gradients


class _Snapshot:
    """The values of some tensors, to be written back in place; those of one type are copied together."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            self._kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        self._values = {kind: copies(members) for kind, members in self._kinds.items()}

    def restore(self) -> None:
        for kind, members in self._kinds.items():
            assign_(members, self._values[kind])


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
