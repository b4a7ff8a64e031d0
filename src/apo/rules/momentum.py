r"""The tail of an optimizer that nobody has written down: its own step, with the momentum taken out and rescaled.

A tail is the sum of the responses to one gradient over all steps to come, with second moments held. The buffers of
momentum :math:`m` are linear in gradients, so this sum equals the *limit of one step* when the same gradient comes
again and again. From empty buffers, the first of these steps is :math:`d_1 = (1-\beta)\,g\,C` for Adam and its kin
and :math:`g` for SGD; the limit is :math:`d_\infty = \kappa\, d_1` with one number :math:`\kappa`, which is
:math:`1/(1-\beta)` for them. So

.. math:: \text{tail}(g) = \kappa \cdot \text{step}(g;\ m = 0,\ \text{all other state as it is}) .

Bias corrections of the first moment, a factor of :math:`1/(1-\beta^t)` on :math:`d_1`, say nothing about the future and
are divided out. Decoupled decay acts at once and is not scaled by :math:`\kappa`.

Where a step has a fixed length (Lion, LAMB; :math:`\kappa = 1`), it is :math:`m/\lVert m\rVert` in effect, and the
length is held as second moments are: the tail is :math:`\lVert g\rVert/\lVert m\rVert` times the step along the
gradient alone. Without this factor a gradient that goes to and fro seems to cause no more than one that lasts, and the
learned rate runs away: Lion's became 0.11, with 10% of digits wrong, and is 0.0008 with 3%.

Which part of the state is momentum, and :math:`\kappa`, are found by :mod:`apo.rules.momentum_probe`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.rules.linearity import measuring_rate
from apo.rules.twin import full_size_twin, streams, tensors_in
from apo.vectors import advance_, differences, scaled, wide

__all__ = ["Momentum", "Path"]

#: The way to an entry of a parameter's state.
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Momentum:
    """Where an optimizer keeps its momentum, and what a step without it has to be multiplied by.

    Attributes:
        buffers: The entries of a parameter's state that hold momentum.
        previous: Those that hold a multiple of the last gradient, and which multiple.
        gain: kappa.
        corrected: Whether the first moment is bias-corrected.
        fading: For steps of a fixed length, the factor by which each buffer fades in a step; else empty.
        decoupled: Whether weight decay acts beside the gradient.
    """

    buffers: frozenset[Path]
    previous: dict[Path, float]
    gain: float
    corrected: bool = False
    fading: dict[Path, float] = field(default_factory=dict)
    decoupled: bool = False

    @torch.no_grad()
    def tails(self, optimizer: Optimizer) -> dict[Tensor, Tensor]:
        """Return the tail of each parameter per unit of the rate, before the optimizer steps; nothing is changed."""
        random = streams(optimizer)
        twin, copies = full_size_twin(optimizer)
        rates = [measuring_rate(group) for group in optimizer.param_groups]
        for group, copied, rate in zip(optimizer.param_groups, twin.param_groups, rates, strict=True):
            copied["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate
            if self.decoupled:
                copied["weight_decay"] = 0.0
        self.take_out(twin, copies.values())
        twin.step()
        if not optimizer.state and all(torch.equal(p, copied) for p, copied in copies.items()):
            self.take_out(twin, copies.values())
            twin.step()  # some only collect statistics in their first step
        random.restore()
        result = {}
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            moving = [p for p in group["params"] if p.grad is not None]
            factors = [self._factor(optimizer, twin, group, p, copies[p]) / rate for p in moving]
            tails = scaled(differences([copies[p] for p in moving], moving), factors)
            if self.decoupled:
                advance_(tails, [wide(p.detach()) for p in moving], -float(group["weight_decay"]))
            result |= dict(zip(moving, tails, strict=True))
        return result

    def take_out(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        """Empty the buffers of momentum; where the last gradient is kept, put the current one."""
        for p in parameters:
            for path, tensor in tensors_in(optimizer.state.get(p, {})):
                if path in self.buffers:
                    tensor.zero_()
                elif path in self.previous and p.grad is not None:
                    tensor.copy_(p.grad).mul_(self.previous[path])

    def _factor(
        self, optimizer: Optimizer, twin: Optimizer, group: dict[str, Any], parameter: Tensor, copied: Tensor
    ) -> float:
        """Return what to multiply the step without momentum by."""
        state = optimizer.state.get(parameter, {})
        count = state.get("step", group.get("step"))
        step = 1.0 + (float(count) if count is not None else 0.0 if not state else math.inf)
        if self.fading:
            return self.gain * self._share(state, twin.state[copied], step) if step > 1 else self.gain
        return self.gain * (1.0 - (1.0 - 1.0 / self.gain) ** step) if self.corrected else self.gain

    def _share(self, before: dict[str, Any], entered: dict[str, Any], step: float) -> float:
        r"""Return how long momentum would be if this gradient had come always, in units of how long it is.

        A step of fixed length divides by the length of momentum; held like second moments, it makes a gradient that is
        larger than its mean cause more. ``entered`` holds what the gradient alone puts into the buffers.
        """
        old = dict(tensors_in(before))
        constant, actual = 0.0, 0.0
        for path, tensor in tensors_in(entered):
            if path in self.fading and path in old:
                fading = self.fading[path]
                constant += float(torch.linalg.vector_norm(tensor)) ** 2 * ((1 - fading**step) / (1 - fading)) ** 2
                actual += float(torch.linalg.vector_norm(fading * old[path] + tensor)) ** 2
        return math.sqrt(constant / actual) if actual > 0 else 1.0
