"""The tails of torch's optimizers in closed form; :mod:`apo.rules.tail` has their formulas in a table.

Each is called after the optimizer has stepped, with the gradients of the parameters of one group, their states, the
group, whether each of them is fresh, and a factor by which the tails are multiplied: minus the rate.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.torch_internals import foreach_add_, foreach_div, foreach_div_, foreach_mul_, foreach_sqrt
from apo.vectors import copies, scaled, wide, widened

__all__ = ["CLOSED_FORMS", "State"]

State = dict[str, Any]


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
    second = widened([s["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"] for s in states])
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


def _radam(
    gradients: list[Tensor], states: list[State], group: dict[str, Any], fresh: Sequence[bool], factor: float
) -> list[Tensor]:
    roots = list(foreach_sqrt(widened([s["exp_avg_sq"] for s in states])))
    foreach_add_(roots, group["eps"])  # before the bias correction, unlike Adam's
    adaptive = list(foreach_div(gradients, roots))
    result = []
    for gradient, rectified, state in zip(gradients, adaptive, states, strict=True):
        scale = _rectification(group["betas"][1], state["step"]).to(gradient.dtype)
        is_plain = state["step"] < _first_rectified(group["betas"][1])
        result.append(factor * (scale * rectified + is_plain.to(gradient.dtype) * gradient))
    return result


def _rectification(beta: float, step: Tensor) -> Tensor:
    """Return RAdam's rectification, before its first rectified step the one of that step, times sqrt(1 - beta ** t)."""
    first, step = _first_rectified(beta), step.double()
    if math.isinf(first):
        return torch.zeros_like(step)
    counted = step.clamp(min=first)
    powers = beta**counted
    longest = 2 / (1 - beta) - 1
    length = longest - 2 * counted * powers / (1 - powers)
    squared = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return squared.clamp(min=0).sqrt() * (-torch.expm1(step * math.log(beta))).sqrt()


@functools.lru_cache
def _first_rectified(beta: float) -> float:
    """Return the first step that RAdam rectifies; infinity if its second moments are too short-lived for that.

    Example:
        >>> _first_rectified(0.999), _first_rectified(0.5)
        (6, inf)
    """
    longest = 2 / (1 - beta) - 1
    if longest <= 5:
        return math.inf
    return next(t for t in itertools.count(1) if longest - 2 * t * beta**t / (1 - beta**t) > 5)


def _muon(
    gradients: list[Tensor], states: list[State], group: dict[str, Any], fresh: Sequence[bool], factor: float
) -> list[Tensor]:
    result = []
    for gradient, state, is_fresh in zip(gradients, states, fresh, strict=True):
        momentum = gradient if is_fresh else wide(state["momentum_buffer"])  # there is no bias correction
        if group["nesterov"]:
            momentum = gradient.lerp(momentum, group["momentum"])
        length = gradient.norm() / momentum.norm().clamp(min=group["eps"])
        scale = factor * _muon_scale(group["adjust_lr_fn"], gradient.shape)
        result.append(scale * length * _orthogonalised(gradient, group).to(gradient.dtype))
    return result


def _muon_scale(adjustment: str | None, shape: torch.Size) -> float:
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if adjustment == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def _orthogonalised(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """Apply Muon's Newton-Schulz iteration, in bfloat16 as Muon does it."""
    a, b, c = group["ns_coefficients"]
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16().T if tall else matrix.bfloat16()
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _rmsprop(
    gradients: list[Tensor], states: list[State], group: dict[str, Any], fresh: Sequence[bool], factor: float
) -> list[Tensor]:
    second = widened([s["square_avg"] for s in states])
    if group["centered"]:
        second = [value - wide(s["grad_avg"]) ** 2 for value, s in zip(second, states, strict=True)]
    roots = list(foreach_sqrt(second))
    return _divided(gradients, roots, group["eps"], factor / (1.0 - group["momentum"]))


def _adamax(
    gradients: list[Tensor], states: list[State], group: dict[str, Any], fresh: Sequence[bool], factor: float
) -> list[Tensor]:
    return _divided(gradients, copies(widened([s["exp_inf"] for s in states])), 0.0, factor)


def _divided(gradients: list[Tensor], divisors: list[Tensor], eps: float, factor: float) -> list[Tensor]:
    """Return ``factor * gradients / (divisors + eps)``; the divisors are used up."""
    if eps:
        foreach_add_(divisors, eps)
    result = list(foreach_div(gradients, divisors))
    foreach_mul_(result, factor)
    return result


#: The tail of each class; Muon is not in every torch.
CLOSED_FORMS: dict[type[Optimizer], Callable[..., list[Tensor]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.NAdam: _adam,
    torch.optim.RAdam: _radam,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adamax: _adamax,
}
if hasattr(torch.optim, "Muon"):
    CLOSED_FORMS[torch.optim.Muon] = _muon
