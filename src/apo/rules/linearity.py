r"""Probe whether one step of an optimizer is proportional to its learning rate, and leaves a state that is free of it.

The learning-rate rule rests on :math:`\Delta = \eta\, d` with :math:`d` independent of :math:`\eta`. On a
meta-iteration the optimizer steps at a large rate and the step is scaled, so what the step writes into the optimizer's
state must not depend on :math:`\eta` either. Most of torch's optimizers have both; ASGD, Rprop, LBFGS and Adafactor
lack the first, Prodigy and schedule-free optimizers, which sum up where they have been, lack the second. Nothing is
assumed: a copy of the optimizer takes a few steps on small matrices, each at several rates, the one of a meta-iteration
among them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.errors import NotLinearError
from apo.rules.tail import MEASURING_RATE, measuring_rate
from apo.rules.twin import SmallTwin, flat, full_size_twin, on_small_twins, set_rate, streams, tensors_in

__all__ = ["check_linear_in_lr"]

_SMALL_RATE = 1e-3
_TOLERANCE = 1e-3
#: Some optimizers do something else every few steps: RAdam from the sixth on, Lookahead at each fifth or sixth.
_STEPS = 7


def check_linear_in_lr(optimizer: Optimizer) -> None:
    """Raise unless the optimizer's step is proportional to ``lr`` and its state free of it.

    Raises:
        NotLinearError: It is not, or the probe could not run.
    """
    name = type(optimizer).__name__
    maximizes = any(group.get("maximize") for group in optimizer.param_groups) or getattr(optimizer, "maximize", False)
    if maximizes:
        raise NotLinearError(f"{name} has maximize=True, which apo does not support: minimise the negative instead")
    # The rate of the original's parameters: the small ones of the probe are never float16.
    measured_at = min((measuring_rate(group) for group in optimizer.param_groups), default=MEASURING_RATE)
    try:
        on_small_twins(optimizer, functools.partial(_probe, name, measured_at))
    except NotLinearError as error:
        raise _with_hint(error, optimizer, measured_at) from None
    except Exception as error:
        raise NotLinearError(
            f"{name} could not be probed for a step that is linear in lr ({type(error).__name__}: {error}): "
            "use SGD, Adam, AdamW or another first-order optimizer, or pass check_linear=False if you know that it is"
            + _inside(optimizer)
        ) from error


def _with_hint(error: NotLinearError, optimizer: Optimizer, measured_at: float) -> NotLinearError:
    """Return the error with what to change: a wrapper, or a decay that shrinks weights which have moved already."""
    inside = _inside(optimizer)
    if inside:
        return NotLinearError(f"{error}{inside}")
    decays = [group["weight_decay"] for group in optimizer.param_groups if group.get("weight_decay")]
    if not decays:
        return error
    try:
        on_small_twins(optimizer, functools.partial(_probe, "", measured_at, without_decay=True))
    except Exception:
        return error
    return NotLinearError(f"{error}; {type(optimizer).__name__} is one with weight_decay=0, got {decays[0]}")


def _inside(optimizer: Optimizer) -> str:
    """Return what to say of an optimizer that wraps another one, as Lookahead and SAM do; usually nothing."""
    inner = [name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)]
    if not inner:
        return ""
    return (
        f"; {type(optimizer).__name__} wraps an optimizer: give apo that one, optimizer.{inner[0]}, and step as before"
    )


def _probe(name: str, measured_at: float, build: SmallTwin, without_decay: bool = False) -> None:
    """Take a few steps at rate 1, and compare each with the same step at other rates."""
    probe, parameters = build()
    for group in probe.param_groups if without_decay else ():
        group["weight_decay"] = 0.0
    generator = torch.Generator().manual_seed(0)
    depends = ""
    set_rate(probe, 1.0)
    for _ in range(_STEPS):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
        branches = [(rate, *full_size_twin(probe)) for rate in sorted({_SMALL_RATE, measured_at} - {1.0})]
        before, random = [p.detach().clone() for p in parameters], streams(probe)
        probe.step()
        for rate, branch, copies in branches:
            set_rate(branch, rate)
            random.restore()  # an optimizer with random numbers takes the same ones at every rate
            branch.step()
            moved = [copies[p] for p in parameters]
            _compare_steps(before, parameters, moved, rate, name)
            depends = depends or _rate_in_state(probe, branch)
    if depends:  # said last: a step that is not proportional is the simpler reason
        raise NotLinearError(
            f"the state of {name} depends on its lr ({depends!r} does), so apo, which measures steps at another rate, "
            "would ruin it: use SGD, Adam, AdamW or another optimizer whose state depends on gradients alone"
        )


def _compare_steps(before: list[Tensor], plain: list[Tensor], other: list[Tensor], rate: float, name: str) -> None:
    start, reference, found = (flat(vector) for vector in (before, plain, other))
    rounding = 4 * max(torch.finfo(p.dtype).eps for p in plain) * max(1.0, 1 / rate) * torch.linalg.vector_norm(start)
    expected, found = reference - start, (found - start) / rate
    allowed = _TOLERANCE * torch.linalg.vector_norm(expected) + rounding
    if not torch.linalg.vector_norm(found - expected) <= allowed:
        raise NotLinearError(
            f"the step of {name} is not proportional to its lr, so apo cannot learn the rate: "
            "use SGD, Adam, AdamW, RMSprop, NAdam, Adamax, Muon or another optimizer that is"
        )


def _rate_in_state(plain: Optimizer, other: Optimizer) -> str:
    """Return the name of something that an optimizer remembers of a step and that differs between two rates."""
    its = dict(_state(other))
    for path, value in _state(plain):
        reference, found = (_wide(tensor) for tensor in (value, its.get(path, value)))
        scale = _TOLERANCE * float(torch.linalg.vector_norm(torch.nan_to_num(reference)))
        same_shape = reference.shape == found.shape
        if not same_shape or not torch.allclose(reference, found, rtol=0.0, atol=scale, equal_nan=True):
            return str(path[-1])
    return ""


def _state(optimizer: Optimizer) -> Any:
    """Yield what an optimizer remembers: state, what it keeps in its groups, and its attributes."""
    order = {p: index for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    for key, state in optimizer.state.items():
        yield from tensors_in(state, ("state", order.get(key, key) if isinstance(key, Tensor) else key))
    for index, group in enumerate(optimizer.param_groups):
        yield from tensors_in({key: v for key, v in group.items() if key not in ("params", "lr")}, ("group", index))
    for key, value in vars(optimizer).items():
        if key not in ("state", "param_groups", "defaults"):
            yield from tensors_in(value, ("attribute", key))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)
