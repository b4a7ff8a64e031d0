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

Which part of the state is momentum is found on a small copy of the optimizer: it changes sign with all gradients, and
once it is taken out, a step no longer depends on the signs of earlier gradients. :math:`\kappa` is how long a step
becomes from empty buffers on while one gradient comes again and again and all other state is held.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.errors import ApoWarning
from apo.rules.tail import measuring_rate
from apo.rules.twin import SmallTwin, flat, full_size_twin, on_small_twins, set_rate, streams, tensors_in
from apo.vectors import advance_, differences, scaled, wide

__all__ = ["Momentum", "UnknownMomentumError", "find_momentum", "momentum_of"]

_TINY_RATE = 2.0**-20  # weights that hardly move, so that only gradients differ between two histories
_HISTORY = 8
_LONGEST = 400  # steps of a constant gradient after which even slow momentum counts as having reached its limit
_FAINT = 2.0**-7  # of a gradient that lets even a little momentum decide the sign of the step
_SAME = 1e-3

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
        set_rate(twin, measuring_rate)
        for group in twin.param_groups if self.decoupled else ():
            group["weight_decay"] = 0.0
        self.take_out(twin, copies.values())
        twin.step()
        if not optimizer.state and all(torch.equal(p, copied) for p, copied in copies.items()):
            self.take_out(twin, copies.values())
            twin.step()  # some only collect statistics in their first step
        random.restore()
        result = {}
        for group in optimizer.param_groups:
            moving, rate = [p for p in group["params"] if p.grad is not None], measuring_rate(group)
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


class UnknownMomentumError(RuntimeError):
    """An optimizer's step depends on earlier gradients in a way that could not be taken out of it."""


def momentum_of(optimizer: Optimizer) -> Momentum | None:
    """Return the momentum of an optimizer's step; None without momentum or, with a warning, without a way."""
    try:
        return find_momentum(optimizer)
    except UnknownMomentumError as error:
        warnings.warn(
            f"{type(optimizer).__name__} has momentum that apo does not know ({error}), so it looks one step ahead, "
            "which can make the learned rate too large: describe what a gradient causes by apo.register_tail(...)",
            ApoWarning,
            stacklevel=4,
        )
        return None


def find_momentum(optimizer: Optimizer) -> Momentum | None:
    """Find an optimizer's momentum on a small copy; None if its step does not depend on earlier gradients' signs.

    Raises:
        UnknownMomentumError: It has momentum that is not in the state of its parameters, or could not be probed.
    """
    try:
        return on_small_twins(optimizer, functools.partial(_find, type(optimizer).__name__))
    except UnknownMomentumError:
        raise
    except Exception as error:
        raise UnknownMomentumError(f"{type(error).__name__}: {error}") from error


def _find(name: str, build: SmallTwin) -> Momentum | None:
    found = _odd_entries(build)
    plain, flipped = (_last_step(build, sign, None) for sign in (1.0, -1.0))
    if _agree(plain, flipped):
        return None
    without = [_last_step(build, sign, found) for sign in (1.0, -1.0)]
    if not _agree(*without):
        raise UnknownMomentumError(f"{name} keeps momentum where its parameters' state does not show it")
    gain = _gain(build, found)
    if not math.isfinite(gain):  # such as a running mean that is subtracted from second moments
        raise UnknownMomentumError(f"{name} keeps more than momentum where its state changes sign with the gradients")
    return Momentum(
        found.buffers,
        found.previous,
        gain,
        _is_corrected(build, found, gain),
        _fading(build, found, gain),
        _decays_apart(build),
    )


class _Run:
    """A small copy of an optimizer under gradients that are given."""

    def __init__(self, build: SmallTwin, rate: float = _TINY_RATE, decay: bool = False) -> None:
        self.optimizer, self.parameters = build()
        self.random = streams(self.optimizer)
        set_rate(self.optimizer, rate)
        self.rate, self.last = rate, [torch.zeros_like(p) for p in self.parameters]
        for group in self.optimizer.param_groups:
            if "weight_decay" in group and not decay:
                group["weight_decay"] = 0.0

    def step(self, gradients: list[Tensor], without: Momentum | None = None) -> Tensor:
        """Step, after taking out momentum if asked to; return the displacement per unit of the rate."""
        self.receive(gradients)
        if without is not None:
            with torch.no_grad():
                without.take_out(self.optimizer, self.parameters)
        before = [p.detach().clone() for p in self.parameters]
        self.random.restore()
        self.optimizer.step()
        moved = [(p.detach() - old) / self.rate for p, old in zip(self.parameters, before, strict=True)]
        with torch.no_grad():
            for p, old in zip(self.parameters, before, strict=True):
                p.copy_(old)
        return flat(moved)

    def receive(self, gradients: list[Tensor]) -> None:
        """Set the gradients of the next step."""
        self.last = [gradient.to(p) for p, gradient in zip(self.parameters, gradients, strict=True)]
        for p, gradient in zip(self.parameters, self.last, strict=True):
            p.grad = gradient.clone()  # some optimizers change it

    def branch(self) -> _Run:
        """Return a copy that continues by itself."""
        copy = object.__new__(_Run)
        copy.optimizer, stand_ins = full_size_twin(self.optimizer)
        copy.parameters = [stand_ins[p] for p in self.parameters]
        copy.random, copy.rate, copy.last = self.random, self.rate, self.last
        return copy

    def entries(self) -> dict[tuple[int, Path], Tensor]:
        """Return copies of the state's tensors."""
        states = enumerate(self.optimizer.state.get(p, {}) for p in self.parameters)
        return {(i, path): tensor.clone() for i, state in states for path, tensor in tensors_in(state)}


def _gradients(build: SmallTwin) -> Iterator[list[Tensor]]:
    """Yield gradients of one size for each element, with random signs."""
    generator = torch.Generator().manual_seed(0)
    shapes = [p.shape for p in build()[1]]
    sizes = [0.5 + torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    while True:
        signs = [torch.randint(2, shape, generator=generator) * 2.0 - 1.0 for shape in shapes]
        yield [size * sign for size, sign in zip(sizes, signs, strict=True)]


def _history(build: SmallTwin, length: int, sign: float = 1.0) -> _Run:
    run = _Run(build)
    for gradients in itertools.islice(_gradients(build), length):
        run.step([sign * gradient for gradient in gradients])
    return run


def _last_step(build: SmallTwin, sign: float, without: Momentum | None) -> Tensor:
    """Return the step at a gradient whose predecessors had a sign."""
    run = _history(build, _HISTORY, sign)
    last = next(itertools.islice(_gradients(build), _HISTORY, None))
    return run.step([_FAINT * gradient for gradient in last], without)


def _agree(one: Tensor, other: Tensor) -> bool:
    return bool(torch.linalg.vector_norm(one - other) <= _SAME * torch.linalg.vector_norm(one))


def _odd_entries(build: SmallTwin) -> Momentum:
    """Find the entries of the state that change sign with all gradients, and those that are the last one's multiple."""
    runs = [_history(build, _HISTORY, sign) for sign in (1.0, -1.0)]
    other = runs[1].entries()
    buffers: set[Path] = set()
    previous: dict[Path, float] = {}
    for (index, path), tensor in runs[0].entries().items():
        gradient, mirrored = runs[0].last[index], other[index, path]
        is_odd = tensor.is_floating_point() and tensor.shape == mirrored.shape and bool(tensor.any())
        if not is_odd or not _agree(tensor.double(), -mirrored.double()):
            continue
        if tensor.shape == gradient.shape:
            multiple = float((tensor * gradient).sum() / (gradient * gradient).sum())
            if _agree(tensor.double(), multiple * gradient.double()):
                previous[path] = multiple
                continue
        buffers.add(path)
    return Momentum(frozenset(buffers), {path: c for path, c in previous.items() if path not in buffers}, 1.0)


def _gain(build: SmallTwin, found: Momentum) -> float:
    """Return kappa: how long a step from empty buffers becomes while one gradient comes and other state is held."""
    base = _history(build, 3 * _HISTORY)
    gradients = next(itertools.islice(_gradients(build), 3 * _HISTORY, None))
    kept: dict[tuple[int, Path], Tensor] = {}
    first, lengths, limits = None, [], []
    for _ in range(_LONGEST):
        run = base.branch()
        run.receive(gradients)
        with torch.no_grad():
            found.take_out(run.optimizer, run.parameters)
            for index, p in enumerate(run.parameters):
                for path, tensor in tensors_in(run.optimizer.state.get(p, {})):
                    if (index, path) in kept:
                        tensor.copy_(kept[index, path])
        step = run.step(gradients)
        kept = {key: tensor for key, tensor in run.entries().items() if key[1] in found.buffers}
        first = step if first is None else first
        lengths.append(float(step @ first / (first @ first)))
        limits.append(_limit(lengths))
        if len(limits) > 4 and max(limits[-4:]) - min(limits[-4:]) <= 1e-4 * abs(limits[-1]):
            break
    return limits[-1]


def _limit(values: list[float]) -> float:
    """Return where a sequence that approaches its limit by a constant factor will end (Aitken's delta-squared)."""
    if len(values) < 3:
        return values[-1]
    a, b, c = values[-3:]
    bend = (c - b) - (b - a)
    shrinks = abs(c - b) < abs(b - a)
    return c - (c - b) ** 2 / bend if shrinks and abs(bend) > 1e-12 * abs(c) else c


def _is_corrected(build: SmallTwin, found: Momentum, gain: float) -> bool:
    r"""Return whether the first moment is bias-corrected: whether steps from empty buffers are larger at first.

    Then they begin about :math:`\kappa` times as large as later, as :math:`1/(1-\beta^t)` does, and this is gone as
    soon as momentum has filled up. Second moments without bias correction make early steps larger, too, but for longer.
    """
    if not 1.2 < gain < _LONGEST / 5:
        return False
    filled = int(2.3 * gain) + 1  # beta ** t = 0.1
    run, sizes = _Run(build), []
    for gradients in itertools.islice(_gradients(build), 3 * filled):
        sizes.append(float(torch.linalg.vector_norm(run.branch().step(gradients, found))))
        run.step(gradients)
    begins = next((size for size in sizes if size), sizes[-1])  # some skip their first step
    return 0.4 * gain < begins / sizes[-1] < 2.5 * gain and sizes[filled - 1] < 1.25 * sizes[-1]


def _fading(build: SmallTwin, found: Momentum, gain: float) -> dict[Path, float]:
    """Return the factor by which each buffer fades, for an optimizer whose step has a fixed length; else nothing."""
    if not 1 / 1.2 < gain < 1.2:
        return {}
    base = _history(build, 3 * _HISTORY)
    gradients = next(itertools.islice(_gradients(build), 3 * _HISTORY, None))
    doubled = base.branch()
    for p in doubled.parameters:
        for path, tensor in tensors_in(doubled.optimizer.state.get(p, {})):
            if path in found.buffers:
                tensor.mul_(2.0)
    longer = doubled.step([2.0 * gradient for gradient in gradients])
    if torch.linalg.vector_norm(longer) > 1.2 * torch.linalg.vector_norm(base.branch().step(gradients)):
        return {}
    base.step(gradients, found)
    one = base.entries()
    base.step(gradients)
    two = base.entries()
    sizes = {key: (torch.linalg.vector_norm(one[key]), torch.linalg.vector_norm(two[key])) for key in one}
    return {path: float(b / a) - 1.0 for (_, path), (a, b) in sizes.items() if path in found.buffers and a}


def _decays_apart(build: SmallTwin) -> bool:
    """Return whether weight decay moves weights by ``-lr * weight_decay * weights``, whatever the gradients."""
    run = _Run(build, decay=True)
    groups = run.optimizer.param_groups
    if not any(group.get("weight_decay") for group in groups):
        return False
    zeros, step = [torch.zeros_like(p) for p in run.parameters], torch.zeros(1)
    for _ in range(3):  # from the second on, decay that is a part of the gradient is in the momentum
        step = run.step(zeros)
    decay = [float(group.get("weight_decay", 0.0)) * p.detach() for group in groups for p in group["params"]]
    return _agree(-flat(decay), step)
