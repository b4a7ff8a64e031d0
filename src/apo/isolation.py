"""Keep a meta-step from leaving traces: buffers, gradients, random streams and module modes.

A forward pass in training mode moves BatchNorm's running statistics and draws dropout masks from the random stream; a
backward pass fills ``.grad``. A meta-step does both several times, and afterwards everything must be as an ordinary
step would have left it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["RandomState", "undisturbed"]


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


@contextmanager
def undisturbed(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> Iterator[None]:
    """Restore buffers, ``.grad``, modes and random streams of everything involved on leaving.

    Inside, every ``.grad`` is ``None``: a backward pass starts from a clean slate.

    Args:
        modules: The network and, where it is one, the criterion.
        parameters: Parameters to protect beside those of the modules (the optimizer's own).
    """
    owners = [owner for module in modules for owner in module.modules()]  # walked once: it is what costs time here
    tensors = {id(p): p for owner in owners for p in owner._parameters.values() if p is not None}
    tensors |= {id(p): p for p in parameters}
    buffers = [
        (owner, name, buffer, buffer.clone())
        for owner in owners
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    modes = [(owner, owner.training) for owner in owners]
    # Gradients that lie in the buckets of DistributedDataParallel are overwritten by its next pass.
    copied = any(isinstance(o, nn.parallel.DistributedDataParallel) and o.gradient_as_bucket_view for o in owners)
    gradients = [(p, p.grad.clone() if copied and p.grad is not None else p.grad) for p in tensors.values()]
    random_state = RandomState.capture({p.device for p in tensors.values()})
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner._buffers[name] = buffer if _is_expanded(buffer) else buffer.copy_(value)
        for owner, training in modes:
            if owner.training != training:
                owner.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient
        random_state.restore()


def _is_expanded(tensor: Tensor) -> bool:
    """Tell whether elements share memory, as ``expand`` makes them: torch lets nobody write into such a tensor."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
