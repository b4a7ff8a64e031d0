r"""Look-ahead directions: which way a learning-rate rule looks, per unit of the rate.

With momentum, one step is mostly old gradients; what the *current* gradient does happens over the next steps. Looking
one step ahead sees a tenth of it (at momentum 0.9) and the learned rate runs away. The *tail* is the whole displacement
that the current gradient will cause if no other comes, at a constant rate and with second moments held fixed:

====================  ==========================================================================
optimizer             tail per unit of lr
====================  ==========================================================================
SGD                   :math:`-g\,(1-\tau)/(1-\mu)`, Nesterov :math:`-g\,(1 + (1-\tau)\mu/(1-\mu))`
Adam, AdamW, NAdam    :math:`-g / (\sqrt{\hat v} + \epsilon)` (amsgrad: with its maximum)
RMSprop               :math:`-g / ((\sqrt{v} + \epsilon)(1-\mu))` (centered: :math:`v - \bar g^2`)
Adamax                :math:`-g / u`
others                the optimizer's own step (right for those without momentum)
====================  ==========================================================================

Here :math:`g` contains coupled weight decay, :math:`\tau` is dampening (absent on a parameter's first step) and
decoupled decay adds :math:`-w\,\theta`, which acts at once.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.torch_internals import foreach_add_, foreach_div, foreach_div_, foreach_mul_, foreach_sqrt
from apo.vectors import advance_, copies, scaled, wide

__all__ = ["coupled_decay", "has_tail", "tail_displacement"]

State = dict[str, Any]


def coupled_decay(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Return the coefficient of weight decay that the optimizer adds to the gradient (0 if its decay is decoupled)."""
    decoupled = isinstance(optimizer, (torch.optim.AdamW, *_DECOUPLED)) or group.get("decoupled_weight_decay", False)
    known = any(base.__module__.startswith("torch.optim") for base in type(optimizer).__mro__ if base is not Optimizer)
    return 0.0 if decoupled or not known else float(group.get("weight_decay", 0.0))


def has_tail(optimizer: Optimizer) -> bool:
    """Return whether the tail of this optimizer is known in closed form."""
    return _tail_class(type(optimizer)) is not None


@functools.lru_cache
def _tail_class(kind: type[Optimizer]) -> type[Optimizer] | None:
    """Return the class with a known tail whose step this is; a subclass with a step of its own is another optimizer."""
    return next((base for base in kind.__mro__ if base in _TAILS and _unwrapped(base) is _unwrapped(kind)), None)


def _unwrapped(kind: type[Optimizer]) -> Any:
    return inspect.unwrap(kind.step)  # torch wraps the step of each class to run its hooks


@torch.no_grad()
def tail_displacement(
    optimizer: Optimizer,
    group: dict[str, Any],
    theta: Sequence[Tensor],
    parameters: Sequence[Tensor],
    fresh: Sequence[bool],
    rate: float,
) -> list[Tensor]:
    """Return ``rate`` times the tail of some parameters of one group, after the optimizer has stepped.

    Args:
        optimizer: One for which :func:`has_tail` holds.
        group: The parameters' group.
        theta: Their values before the step.
        parameters: The parameters, with their gradients.
        fresh: Whether each of them had no state before this step.
        rate: The learning rate at which to look ahead.
    """
    if not parameters:
        return []
    gradients = [wide(p.grad) for p in parameters]  # type: ignore[arg-type]
    decay = coupled_decay(optimizer, group)
    if decay:
        gradients = copies(gradients)
        advance_(gradients, [wide(value) for value in theta], decay)
    states = [optimizer.state[p] for p in parameters]
    kind = _tail_class(type(optimizer))
    assert kind is not None
    # torch keeps second moments of real and imaginary parts apart, in tensors that only look complex.
    reals = [_as_real(gradient) for gradient in gradients]
    states = [
        {name: _as_real(value) for name, value in state.items()} if g.is_complex() else state
        for g, state in zip(gradients, states, strict=True)
    ]
    displacement = _TAILS[kind](reals, states, group, fresh, -rate)
    pairs = zip(gradients, displacement, strict=True)
    displacement = [torch.view_as_complex(part) if g.is_complex() else part for g, part in pairs]
    decoupled = float(group.get("weight_decay", 0.0)) - decay
    if decoupled:
        advance_(displacement, [wide(value) for value in theta], -rate * decoupled)
    return displacement


def _as_real(value: Any) -> Any:
    return torch.view_as_real(value) if isinstance(value, Tensor) and value.is_complex() else value


def _sgd(
    gradients: list[Tensor], states: list[State], group: dict[str, Any], fresh: Sequence[bool], factor: float
) -> list[Tensor]:
    momentum = group["momentum"]
    weights = []
    for is_fresh in fresh:
        entering = 1.0 if is_fresh else 1.0 - group["dampening"]
        now = 1.0 if group["nesterov"] or not momentum else entering
        weights.append(factor * (now + entering * momentum / (1.0 - momentum)))
    return scaled(gradients, weights[0] if len(set(weights)) == 1 else weights)


def _adam(
    gradients: list[Tensor], states: list[State], group: dict[str, Any], fresh: Sequence[bool], factor: float
) -> list[Tensor]:
    second = [wide(s["max_exp_avg_sq"] if group.get("amsgrad") else s["exp_avg_sq"]) for s in states]
    roots = list(foreach_sqrt(second))
    corrections = [_root_of_bias_correction(group["betas"][1], s["step"]) for s in states]
    foreach_div_(roots, corrections)
    return _divided(gradients, roots, group["eps"], factor)


def _root_of_bias_correction(beta: float, step: Tensor) -> Any:
    """Return sqrt(1 - beta ** t); a count that lives on an accelerator is not read."""
    if not beta:
        return 1.0 if step.device.type == "cpu" else torch.ones_like(step)
    # expm1 because 1 - 0.999 ** t cancels while t is small
    if step.device.type == "cpu":
        return math.sqrt(-math.expm1(float(step) * math.log(beta)))
    return (-torch.expm1(step * math.log(beta))).sqrt()


def _rmsprop(
    gradients: list[Tensor], states: list[State], group: dict[str, Any], fresh: Sequence[bool], factor: float
) -> list[Tensor]:
    second = [wide(s["square_avg"]) for s in states]
    if group["centered"]:
        second = [value - wide(s["grad_avg"]) ** 2 for value, s in zip(second, states, strict=True)]
    roots = list(foreach_sqrt(second))
    return _divided(gradients, roots, group["eps"], factor / (1.0 - group["momentum"]))


def _adamax(
    gradients: list[Tensor], states: list[State], group: dict[str, Any], fresh: Sequence[bool], factor: float
) -> list[Tensor]:
    return _divided(gradients, copies([wide(s["exp_inf"]) for s in states]), 0.0, factor)


def _divided(gradients: list[Tensor], divisors: list[Tensor], eps: float, factor: float) -> list[Tensor]:
    """Return ``factor * gradients / (divisors + eps)``; the divisors are used up."""
    if eps:
        foreach_add_(divisors, eps)
    result = list(foreach_div(gradients, divisors))
    foreach_mul_(result, factor)
    return result


_TAILS: dict[type[Optimizer], Callable[..., list[Tensor]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.NAdam: _adam,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adamax: _adamax,
}

#: Optimizers of torch whose decay is decoupled without saying so in their groups (Muon is not in every torch).
_DECOUPLED = tuple(filter(None, [getattr(torch.optim, "Muon", None)]))
