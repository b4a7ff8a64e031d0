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

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.vectors import wide

__all__ = ["coupled_decay", "has_tail", "tail_direction"]

State = dict[str, Any]


def coupled_decay(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Return the coefficient of weight decay that the optimizer adds to the gradient (0 if its decay is decoupled)."""
    decoupled = isinstance(optimizer, (torch.optim.AdamW, *_DECOUPLED)) or group.get("decoupled_weight_decay", False)
    known = type(optimizer).__module__.startswith("torch.optim")
    return 0.0 if decoupled or not known else float(group.get("weight_decay", 0.0))


def has_tail(optimizer: Optimizer) -> bool:
    """Tell whether the tail of this optimizer is known in closed form."""
    return type(optimizer) in _TAILS


def tail_direction(
    optimizer: Optimizer, group: dict[str, Any], theta: Tensor, parameter: Tensor, fresh: bool
) -> Tensor:
    """Return the tail of one parameter per unit of lr, after the optimizer has stepped.

    Args:
        optimizer: One for which :func:`has_tail` holds.
        group: The parameter's group.
        theta: Its value before the step.
        parameter: The parameter, with its gradient.
        fresh: Whether it had no state before this step.
    """
    gradient = wide(parameter.grad)  # type: ignore[arg-type]
    decay = coupled_decay(optimizer, group)
    if decay:
        gradient = gradient + decay * wide(theta)
    direction = _TAILS[type(optimizer)](gradient, optimizer.state[parameter], group, fresh).neg_()
    decoupled = float(group.get("weight_decay", 0.0)) - decay
    return direction - decoupled * wide(theta) if decoupled else direction


def _sgd(gradient: Tensor, state: State, group: dict[str, Any], fresh: bool) -> Tensor:
    momentum = group["momentum"]
    entering = 1.0 if fresh else 1.0 - group["dampening"]
    later = entering * momentum / (1.0 - momentum)
    return gradient * ((1.0 if group["nesterov"] or not momentum else entering) + later)


def _adam(gradient: Tensor, state: State, group: dict[str, Any], fresh: bool) -> Tensor:
    second = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    beta, step = group["betas"][1], state["step"]
    # expm1 because 1 - 0.999 ** t cancels while t is small; the count may live on an accelerator, so it is not read.
    correction = -torch.expm1(step.to(gradient.dtype) * math.log(beta)) if beta else 1.0
    return gradient / ((wide(second) / correction).sqrt() + group["eps"])


def _rmsprop(gradient: Tensor, state: State, group: dict[str, Any], fresh: bool) -> Tensor:
    second = wide(state["square_avg"])
    if group["centered"]:
        second = second - wide(state["grad_avg"]) ** 2
    return gradient / ((second.sqrt() + group["eps"]) * (1.0 - group["momentum"]))


def _adamax(gradient: Tensor, state: State, group: dict[str, Any], fresh: bool) -> Tensor:
    return gradient / wide(state["exp_inf"])


_TAILS: dict[type[Optimizer], Callable[[Tensor, State, dict[str, Any], bool], Tensor]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.NAdam: _adam,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adamax: _adamax,
}

#: Optimizers of torch whose decay is decoupled without saying so in their groups (Muon is not in every torch).
_DECOUPLED = tuple(filter(None, [getattr(torch.optim, "Muon", None)]))
