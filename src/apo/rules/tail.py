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
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.rules.base import Proposal
from apo.rules.closed_forms import CLOSED_FORMS, State
from apo.vectors import advance_, copies, differences, dot, norm, scaled, widened

if TYPE_CHECKING:
    from apo.rules.learning_rate import LearningRate

__all__ = ["RateProposal", "coupled_decay", "has_tail", "measuring_rate", "register_tail"]

#: A step at a small rate drowns in the rounding of the weights; one at this rate keeps its leading digits.
MEASURING_RATE = 2.0**14


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


#: The tails that are known: those of torch, and those that users have registered.
_TAILS: dict[type[Optimizer], Callable[..., list[Tensor]]] = dict(CLOSED_FORMS)

#: Optimizers of torch whose decay is decoupled without saying so in their groups (Muon is not in every torch).
_DECOUPLED = tuple(filter(None, [getattr(torch.optim, "Muon", None)]))

#: The classes that users have registered, and whether their decay is coupled.
_REGISTERED: dict[type[Optimizer] | None, bool] = {}
