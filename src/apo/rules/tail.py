r"""Where a learning-rate rule looks: :class:`RateProposal`, along a direction that does not depend on the rate.

With momentum, one step is mostly old gradients; what the *current* gradient does happens over the next steps. Looking
one step ahead sees a tenth of it (at momentum 0.9) and the learned rate runs away. The *tail* is the whole displacement
that the current gradient will cause if no other comes, at a constant rate and with second moments held fixed:

====================  ==========================================================================
optimizer             tail per unit of lr
====================  ==========================================================================
SGD                   :math:`-g\,(1-\tau)/(1-\mu)`, Nesterov :math:`-g\,(1 + (1-\tau)\mu/(1-\mu))`
Adam, AdamW, NAdam    :math:`-g / (\sqrt{\hat v} + \epsilon)` (amsgrad: with its maximum)
RAdam                 :math:`-g\, r_t \sqrt{1-\beta_2^t} / (\sqrt{v} + \epsilon)`; at first :math:`-g` beside it
RMSprop               :math:`-g / ((\sqrt{v} + \epsilon)(1-\mu))` (centered: :math:`v - \bar g^2`)
Adamax                :math:`-g / u`
Muon                  :math:`-a\, O(g)\, \|g\| / \|M\|`, where :math:`O` orthogonalises and :math:`M` is its momentum
others with momentum  the optimizer's own step without momentum, rescaled: see :mod:`apo.rules.momentum`
others                the optimizer's own step, which is the tail where there is no momentum
====================  ==========================================================================

Here :math:`g` contains coupled weight decay, :math:`\tau` is dampening (absent on a parameter's first step) and
decoupled decay adds :math:`-w\,\theta`, which acts at once. :math:`r_t` is RAdam's rectification, held like a rate.
(Its first five steps are plain gradients. Next to gradients that are small, the rate that these bear may be a thousand
times what the steps after them bear: an autoencoder went from 0.69 to 2.4 at the sixth. So a rate is learned that both
bear, with :math:`r_t` of the sixth step.)
Muon moves by :math:`-a\, O(M)`, which is as long for any M. So the tail has the shape that Muon would give to the
gradient, and is as much longer than a step as the gradient is longer than M, of which it is a part.
(Without the quotient it would hide how much of a gradient is noise: the learned rate was 0.56 then, with 7.6% of digits
wrong. Multiplied by :math:`(M M^\top)^{-1/2}`, which turns M into O(M), a gradient that differs a little from the
largest direction of M is magnified in all others, a hundredfold: the rate of a GPT fell to 1/400 of the best one.)
:func:`register_tail` adds further optimizers.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.rules.base import Proposal
from apo.torch_internals import foreach_add_, foreach_div, foreach_div_, foreach_mul_, foreach_sqrt
from apo.vectors import advance_, copies, differences, dot, norm, scaled, wide, widened

if TYPE_CHECKING:
    from apo.rules.learning_rate import LearningRate

__all__ = ["RateProposal", "coupled_decay", "has_tail", "measuring_rate", "register_tail"]

#: A step at a small rate drowns in the rounding of the weights; one at this rate keeps its leading digits.
MEASURING_RATE = 2.0**14

State = dict[str, Any]


def measuring_rate(group: Mapping[str, Any]) -> float:
    """Return the rate at which a meta-iteration steps the parameters of a group."""
    # float16 ends at 65504; all other formats have room for a step thousands of times too large
    return 1.0 if torch.float16 in [p.dtype for p in group["params"]] else MEASURING_RATE


@dataclass(frozen=True)
class _Members:
    """The parameters of one group that move, and what is known of them after the optimizer has stepped."""

    group: dict[str, Any]  # a plain copy
    parameters: list[Tensor]
    origin: list[Tensor]  # theta
    steps: list[Tensor]  # how far the optimizer's own step took them
    measured_at: float  # the rate of that step
    decay: float  # see `coupled_decay`
    fresh: list[bool]  # whether each of them had no optimizer state before
    tails: list[Tensor]  # per unit of the rate, if the optimizer's momentum was found by probing; else empty


class RateProposal(Proposal):
    """A look-ahead along the step that the optimizer has just taken, or along the tail.

    Args:
        rule: The rule.
        groups: The optimizer's param groups.
        theta: The weights before the step, by parameter.
        fresh: The parameters that had no optimizer state before it.
        tails: The tails per unit of the rate, if momentum was found by probing; else empty.
    """

    def __init__(
        self,
        rule: LearningRate,
        groups: Sequence[dict[str, Any]],
        theta: Mapping[Tensor, Tensor],
        fresh: Set[Tensor],
        tails: Mapping[Tensor, Tensor],
    ) -> None:
        self._rule = rule
        self._groups: list[_Members] = []
        self._last: tuple[list[float], list[Tensor]] | None = None  # rates of the groups, and their displacement
        for group in groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            origin = [theta[p] for p in parameters]
            members = _Members(
                group=dict(group),
                parameters=parameters,
                origin=origin,
                steps=differences(parameters, origin),
                measured_at=measuring_rate(group),
                decay=coupled_decay(rule.optimizer, group),
                fresh=[p in fresh for p in parameters],
                tails=[tails[p] for p in parameters] if tails else [],
            )
            self._groups.append(members)
        parameters = [p for members in self._groups for p in members.parameters]
        super().__init__(parameters, [members.decay for members in self._groups for _ in members.parameters])

    def displacement(self, factor: float = 1.0) -> list[Tensor]:
        """Return the look-ahead, or ``factor`` times it.

        Only the displacement is kept: the tail it is made of would be one vector more while the network runs.
        """
        rates = [factor * rate for rate in self._rule.rates_ahead()]
        if self._last is None or self._last[0] != rates:
            self._last = None
            found: list[Tensor] = []
            for members, rate in zip(self._groups, rates, strict=True):
                if self._rule.look_ahead == "step":
                    found += scaled(members.steps, rate / members.measured_at)
                elif members.tails:
                    found += scaled(members.tails, rate)
                elif members.parameters:
                    found += _tail_displacement(self._rule.optimizer, members, rate)
            self._last = rates, found
        return self._last[1]

    def pull_back(self, cotangent: Sequence[Tensor]) -> list[Tensor]:
        """Return <h, Delta> over the parameters of each phi."""
        displacement = self.displacement()
        if not self._rule.per_group:
            return [dot(cotangent, displacement)]
        ends = list(itertools.accumulate(len(members.parameters) for members in self._groups))
        spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        still = torch.zeros((), device=cotangent[0].device)  # for a group in which nothing moves
        return [dot(h, delta) if h else still for h, delta in ((cotangent[span], displacement[span]) for span in spans)]

    def step_norm(self) -> Tensor | None:
        """Return the norm of the step as it was measured; float16 ends too early for that to tell much."""
        if torch.float16 in {p.dtype for p in self.parameters}:
            return None
        return norm([step for members in self._groups for step in members.steps])

    def take_step(self) -> None:
        """Move by the optimizer's own step at the rate in force now."""
        for members, rate in zip(self._groups, self._rule.rates(), strict=True):
            advance_(members.parameters, members.steps, rate / members.measured_at)


def coupled_decay(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Return the coefficient of weight decay that the optimizer adds to the gradient (0 if its decay is decoupled)."""
    if not group.get("weight_decay"):
        return 0.0
    decoupled = isinstance(optimizer, (torch.optim.AdamW, *_DECOUPLED)) or group.get("decoupled_weight_decay", False)
    kind = _tail_class(type(optimizer))
    if kind in _REGISTERED:
        return float(group["weight_decay"]) if _REGISTERED[kind] else 0.0
    known = any(base.__module__.startswith("torch.optim") for base in type(optimizer).__mro__ if base is not Optimizer)
    return 0.0 if decoupled or not known else float(group["weight_decay"])


def has_tail(optimizer: Optimizer) -> bool:
    """Return whether the tail of this optimizer is known in closed form."""
    return _tail_class(type(optimizer)) is not None


def register_tail(
    kind: type[Optimizer], tail: Callable[[Tensor, State, dict[str, Any]], Tensor], *, coupled_decay: bool = False
) -> None:
    r"""Tell apo how far the current gradient will take a parameter in all, with an optimizer that it does not know.

    An optimizer with momentum moves mostly by old gradients, while the learned rate needs what the *current* one will
    do over all steps to come, with second moments held: SGD with momentum :math:`\mu` moves by
    :math:`-\eta\, g/(1-\mu)` on its account. Without a registered tail, apo finds one by probing
    (:mod:`apo.rules.momentum`). A subclass without a ``step`` method inherits the tail.

    Args:
        kind: The optimizer's class.
        tail: Called as ``tail(gradient, state, group)`` for each parameter after the optimizer has stepped, with its
            gradient (float32 at least), ``optimizer.state[parameter]`` and its param group. It returns the displacement
            per unit of ``lr``, which points against the gradient.
        coupled_decay: Whether the optimizer adds ``weight_decay`` times the weights to the gradient; then
            ``gradient`` contains it. If not, decay is taken to move the weights by ``-lr * weight_decay * weights``.

    Raises:
        TypeError: ``kind`` is no optimizer class, or ``tail`` is no function.

    Example:
        >>> import apo, torch
        >>> class HeavyBall(torch.optim.Optimizer):
        ...     def __init__(self, params, lr=0.1, momentum=0.9):
        ...         super().__init__(params, {"lr": lr, "momentum": momentum})
        ...
        ...     @torch.no_grad()
        ...     def step(self):
        ...         for group in self.param_groups:
        ...             for p in group["params"]:
        ...                 velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
        ...                 velocity.mul_(group["momentum"]).add_(p.grad)
        ...                 p.sub_(group["lr"] * velocity)
        >>> apo.register_tail(HeavyBall, lambda gradient, state, group: -gradient / (1 - group["momentum"]))
        >>> apo.LearningRate(HeavyBall([torch.ones(2, requires_grad=True)])).look_ahead
        'tail'
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        got = kind if isinstance(kind, type) else f"an instance of {type(kind).__name__}"
        raise TypeError(f"kind must be a subclass of torch.optim.Optimizer, got {got}: pass the class itself")
    if not callable(tail):
        raise TypeError(f"tail must be a function of (gradient, state, group), got {type(tail).__name__}")

    def tails(
        gradients: list[Tensor], states: list[State], group: dict[str, Any], fresh: Sequence[bool], factor: float
    ) -> list[Tensor]:
        pairs = zip(gradients, states, strict=True)
        return scaled([tail(gradient, state, group).to(gradient.dtype) for gradient, state in pairs], -factor)

    _TAILS[kind] = tails
    _REGISTERED[kind] = coupled_decay
    _tail_class.cache_clear()


@functools.lru_cache
def _tail_class(kind: type[Optimizer]) -> type[Optimizer] | None:
    """Return the class with a known tail whose step this is; a subclass with a step of its own is another optimizer."""
    return next((base for base in kind.__mro__ if base in _TAILS and _unwrapped(base) is _unwrapped(kind)), None)


def _unwrapped(kind: type[Optimizer]) -> Any:
    return inspect.unwrap(kind.step)  # torch wraps the step of each class to run its hooks


@torch.no_grad()
def _tail_displacement(optimizer: Optimizer, members: _Members, rate: float) -> list[Tensor]:
    """Return ``rate`` times the tail, in closed form, of the parameters of one group."""
    kind, group, decay = _tail_class(type(optimizer)), members.group, members.decay
    assert kind is not None
    gradients = widened([p.grad for p in members.parameters])  # type: ignore[misc]
    if decay:
        gradients = copies(gradients)
        advance_(gradients, widened(members.origin), decay)
    states = [optimizer.state[p] for p in members.parameters]
    if any([gradient.is_complex() for gradient in gradients]):  # torch's optimizers see pairs of real numbers
        states = [{key: _as_real(value) for key, value in state.items()} for state in states]
        found = _TAILS[kind]([_as_real(gradient) for gradient in gradients], states, group, members.fresh, -rate)
        pairs = zip(found, gradients, strict=True)
        displacement = [torch.view_as_complex(one) if gradient.is_complex() else one for one, gradient in pairs]
    else:
        displacement = _TAILS[kind](gradients, states, group, members.fresh, -rate)
    decoupled = float(group.get("weight_decay", 0.0)) - decay
    if decoupled:
        advance_(displacement, widened(members.origin), -rate * decoupled)
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


_TAILS: dict[type[Optimizer], Callable[..., list[Tensor]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.NAdam: _adam,
    torch.optim.RAdam: _radam,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adamax: _adamax,
}

#: Optimizers of torch whose decay is decoupled without saying so in their groups (Muon is not in every torch).
_DECOUPLED = tuple(filter(None, [getattr(torch.optim, "Muon", None)]))
_TAILS |= dict.fromkeys(_DECOUPLED, _muon)

#: The classes that users have registered, and whether their decay is coupled.
_REGISTERED: dict[type[Optimizer] | None, bool] = {}
