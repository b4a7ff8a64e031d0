"""Keep a meta-step from leaving traces: buffers, gradients, random streams and module modes.

A forward pass in training mode moves BatchNorm's running statistics and draws dropout masks from the random stream; a
backward pass fills ``.grad``. A meta-step does both several times, and afterwards everything must be as an ordinary
step would have left it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from apo.passes.network import every_module
from apo.vectors import assign_, copies

__all__ = ["RandomState", "Surface", "modes_of", "undisturbed", "with_modes"]


@dataclass(frozen=True)
class RandomState:
    """The state of the random streams: torch's on the CPU and on some CUDA devices, Python's and NumPy's global ones.

    None stands for a stream that is left alone: NumPy's, where nobody has imported it, and both of the host's where the
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
        """Return it without the host's streams, if these have not moved since: nothing has drawn from them."""
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
        numpy = _numpy_random()
        if numpy is not None and self.numpy is not None:
            numpy.set_state(self.numpy)

    def state_dict(self) -> dict[str, object]:
        """Return plain data that ``torch.load(weights_only=True)`` accepts."""
        # NumPy's generator takes lists back as well.
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
        modules: The network and, where it is one, the criterion.
        parameters: Parameters to protect beside those of the modules (the optimizer's own).
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> None:
        self._owners = every_module(modules)
        tensors = {id(p): p for owner in self._owners for p in owner._parameters.values() if p is not None}
        tensors |= {id(p): p for p in parameters}
        self._parameters = list(tensors.values())
        self.devices = {p.device for p in self._parameters}
        self.draws_from_host = True  # random numbers of Python or NumPy, as far as is known

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restore buffers, ``.grad``, modes and random streams of everything involved on leaving.

        Inside, every ``.grad`` is ``None``: a backward pass starts from a clean slate.
        """
        owners = self._owners
        names = [(owner, name, buffer) for owner in owners for name, buffer in owner._buffers.items()]
        names = [(owner, name, buffer) for owner, name, buffer in names if buffer is not None]
        buffers = _Snapshot([buffer for _, _, buffer in names if not _is_expanded(buffer)])
        modes = [owner.training for owner in owners]
        gradients = self._gradients()
        random_state = RandomState.capture(self.devices, self.draws_from_host)
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield
        finally:
            buffers.restore()
            for owner, name, buffer in names:
                owner._buffers[name] = buffer
            for owner, training in zip(owners, modes, strict=True):
                if owner.training != training:
                    owner.training = training
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            random_state.restore()

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


def undisturbed(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return :meth:`Surface.undisturbed` of modules and parameters."""
    return Surface(modules, parameters).undisturbed()


def _is_expanded(tensor: Tensor) -> bool:
    """Tell whether elements share memory, as ``expand`` makes them: torch lets nobody write into such a tensor."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def modes_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, bool]]:
    """Note which modules are in training mode, for :func:`with_modes`."""
    return [(module, module.training) for module in modules]


@contextmanager
def with_modes(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Have modules in the modes of an earlier time, and in those of now on leaving."""
    changed = [(module, training) for module, training in modes if module.training != training]
    try:
        for module, training in changed:
            module.training = training
        yield
    finally:
        for module, training in changed:
            module.training = not training


def _host_streams() -> tuple[tuple, dict[str, Any] | None]:
    numpy = _numpy_random()
    return random.getstate(), None if numpy is None else numpy.get_state(legacy=False)


def _numpy_random() -> Any:
    """Return NumPy's module of random numbers, if anybody has imported it."""
    return sys.modules.get("numpy.random")


def _arrays_as(method: str, tree: Any) -> Any:
    """Turn the arrays in a state of NumPy's generator into something plain, by one of their methods."""
    if isinstance(tree, dict):
        return {key: _arrays_as(method, value) for key, value in tree.items()}
    return getattr(tree, method)() if hasattr(tree, method) else tree
