"""Keep a meta-step from leaving traces: buffers, gradients, random streams and module modes.

A forward pass in training mode moves BatchNorm's running statistics and draws dropout masks from the random stream; a
backward pass fills ``.grad``. A meta-step does both several times, and afterwards everything must be as an ordinary
step would have left it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from apo.vectors import assign_, copies

__all__ = ["RandomState", "Surface", "undisturbed"]


@dataclass(frozen=True)
class RandomState:
    """The state of torch's random streams: the CPU's and those of some CUDA devices."""

    cpu: Tensor
    cuda: dict[int, Tensor]

    @classmethod
    def capture(cls, devices: Iterable[torch.device]) -> RandomState:
        """Read the streams of the CPU and of the CUDA devices among ``devices``."""
        indices = {device.index or 0 for device in devices if device.type == "cuda"}
        return cls(torch.get_rng_state(), {index: torch.cuda.get_rng_state(index) for index in sorted(indices)})

    def restore(self) -> None:
        """Set the streams back to this state."""
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)

    def state_dict(self) -> dict[str, object]:
        """Return plain tensors that ``torch.load(weights_only=True)`` accepts."""
        return {"cpu": self.cpu, "cuda": dict(self.cuda)}

    @classmethod
    def from_state_dict(cls, state: dict) -> RandomState:
        """Read back what :meth:`state_dict` returned."""
        return cls(state["cpu"].cpu(), {int(index): value.cpu() for index, value in state["cuda"].items()})


class Surface:
    """Everything that a pass of some modules may touch; found once, because walking a network costs time.

    Args:
        modules: The network and, where it is one, the criterion.
        parameters: Parameters to protect beside those of the modules (the optimizer's own).
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> None:
        self._owners = [owner for module in modules for owner in module.modules()]
        tensors = {id(p): p for owner in self._owners for p in owner._parameters.values() if p is not None}
        tensors |= {id(p): p for p in parameters}
        self._parameters = list(tensors.values())
        self.devices = {p.device for p in self._parameters}

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
        random_state = RandomState.capture(self.devices)
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
