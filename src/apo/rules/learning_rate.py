r"""Learn the learning rate of any optimizer whose step is proportional to it.

:math:`\phi = \log\eta`, one for all param groups (their ratios stay) or one for each. The optimizer's step is
:math:`\Delta = \eta\, d` with :math:`d` independent of :math:`\eta`, so along the look-ahead direction :math:`v`

.. math::
    \theta'(\phi) = \theta + \frac{\eta}{\sigma} v, \qquad
    \frac{\partial Q}{\partial \log\eta} = \Big\langle \nabla_{\theta'} Q,\ \frac{\eta}{\sigma} v \Big\rangle .

:math:`v` is the *tail* (see :mod:`apo.rules.tail`) or, as in the paper, the step :math:`d` itself. The
over-relaxation :math:`\sigma` makes the rate :math:`\sigma` times the one that the look-ahead prefers: a rate that
minimises the look-ahead exactly stays below the edge of stability and is driven lower and lower by progressive
sharpening.

Recovering :math:`d` as a difference of parameters loses precision when the rate is small, so on a meta-iteration the
optimizer steps at a large rate and the step is scaled; the optimizer's state does not depend on the rate.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.rules.base import MetaOptimizerFactory, Proposal, Rule, Slope
from apo.rules.linearity import check_linear_in_lr
from apo.rules.param_groups import ScheduledGroup, base_rate
from apo.rules.tail import coupled_decay, has_tail, tail_displacement
from apo.rules.warm_start import find_turning_point
from apo.vectors import advance_, differences, dot, norm, scaled

__all__ = ["LearningRate"]

#: RMSprop with bias correction, which is Adam without its first moment.
META_OPTIMIZER = functools.partial(torch.optim.Adam, lr=0.1, betas=(0.0, 0.99))
#: The paper's, without bias correction.
PAPER_META_OPTIMIZER = functools.partial(torch.optim.RMSprop, lr=0.1)
#: A step at a small rate drowns in the rounding of the weights; one at this rate keeps its leading digits.
_MEASURING_RATE = 2.0**14
_LOOK_AHEADS = ("tail", "step")


class LearningRate(Rule):
    r"""Learn the learning rate of ``optimizer`` while it trains.

    Coupled weight decay (``weight_decay`` of SGD, Adam, RMSprop, ...) is an L2 penalty and belongs to the loss term of
    Q; decoupled decay (AdamW, Muon) is part of the step and scales with the learned rate.

    Args:
        optimizer: Any torch optimizer whose step is linear in ``lr``. Its rates are where the search begins; with
            the warm start they hardly matter.
        per_group: Learn one rate for each param group instead of one for all.
        look_ahead: ``"tail"`` or ``"step"`` (the paper's).
        over_relaxation: :math:`\sigma`.
        meta_optimizer: Builds the meta-optimizer from a list of tensors; RMSprop with bias correction at 0.1.
        max_change: Largest change of :math:`\log\eta` in one meta-step; None for no limit.
        bounds: Smallest and largest learned rate.
        warm_start: Find the scale of the rate on the first batch before any weight moves, and start at a tenth of it.
        check_linear: Probe the optimizer and refuse one whose step is not linear in ``lr``.

    Example:
        >>> import apo, torch
        >>> model = torch.nn.Linear(4, 3)
        >>> rule = apo.LearningRate(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        >>> tuner = apo.APO(rule, model, torch.nn.functional.cross_entropy)
        >>> loss = tuner.step(torch.randn(8, 4), torch.randint(3, (8,)))
        >>> tuner.history[0].lr == rule.rates()
        True
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        per_group: bool = False,
        look_ahead: str = "tail",
        over_relaxation: float = 1.4,
        meta_optimizer: MetaOptimizerFactory | None = None,
        max_change: float | None = 0.2,
        bounds: tuple[float, float] = (1e-10, 1e4),
        warm_start: bool = True,
        check_linear: bool = True,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if look_ahead not in _LOOK_AHEADS:
            raise ValueError(f"look_ahead must be 'tail' or 'step', got {look_ahead!r}")
        _check_numbers(over_relaxation, max_change, bounds)
        if not (meta_optimizer is None or callable(meta_optimizer)):
            raise TypeError(
                f"meta_optimizer must be a function that builds an optimizer from a list of tensors, got "
                f"{type(meta_optimizer).__name__}: pass functools.partial(torch.optim.Adam, lr=0.1), for instance"
            )
        if check_linear:
            check_linear_in_lr(optimizer)
        self.optimizer = optimizer
        self.per_group = per_group
        self.look_ahead = look_ahead if has_tail(optimizer) else "step"
        self.over_relaxation = over_relaxation
        self.max_change = max_change
        self.bounds = bounds
        self.warm_start = warm_start
        self._build_meta_optimizer = meta_optimizer or META_OPTIMIZER
        self._groups: list[ScheduledGroup] = []
        self._phi: list[Tensor] = []
        self._ratios: list[float] = []  # rate of each group relative to its phi
        self._first_rate = 1.0  # what the user gave the first group
        self._fresh: set[Tensor] = set()  # parameters without optimizer state before the step that is measured
        self._adopt_groups()
        self.meta_optimizer = self._build_meta_optimizer(self._phi)

    @classmethod
    def paper(cls, optimizer: Optimizer, **options: Any) -> LearningRate:
        """Build the rule with the paper's exact settings (section 5.1).

        They are: look one step ahead, no over-relaxation, RMSprop at 0.1 without bias correction, no limit on a
        change of the rate, no warm start. The paper starts SGD at 0.1 and RMSprop and Adam at 3e-4, meta-updates every
        10 steps, sets ``wsd_weight`` to 0 and searches ``fsd_weight``.

        Example:
            >>> import apo, torch
            >>> apo.LearningRate.paper(torch.optim.SGD([torch.zeros(2, 2)], lr=0.1)).look_ahead
            'step'
        """
        settings: dict[str, Any] = {
            "look_ahead": "step",
            "over_relaxation": 1.0,
            "meta_optimizer": PAPER_META_OPTIMIZER,
            "max_change": None,
            "warm_start": False,
        }
        return cls(optimizer, **(settings | options))

    def phi(self) -> list[Tensor]:
        """Return log eta: 0-dimensional float64 tensors on the CPU."""
        return self._phi

    def learned_rates(self) -> list[float]:
        """Return the learned rate of each param group, before the factor of a scheduler."""
        return [math.exp(float(self._phi_of(i))) * ratio for i, ratio in enumerate(self._ratios)]

    def before_step(self) -> None:
        """Take in new param groups and what schedulers wrote."""
        for group in self._groups:
            group.settle()
        if len(self._groups) != len(self.optimizer.param_groups):
            self._adopt_groups()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Let the optimizer step at a rate at which its step can be measured precisely."""
        self._fresh = {p for group in self._groups for p in group["params"] if not self.optimizer.state.get(p)}
        for group in self._groups:
            group.use(self._measuring_rate(group))
        try:
            yield
        finally:
            self._show()

    def propose(self, theta: Mapping[Tensor, Tensor]) -> Proposal:
        """Measure the step d and look ahead along it or along the tail."""
        members = []
        for group in self._groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            origin = [theta[p] for p in parameters]
            members.append(_Members(parameters, origin, differences(parameters, origin), self._measuring_rate(group)))
        decays = [coupled_decay(self.optimizer, group) for group in self._groups]
        pairs = zip(decays, members, strict=True)
        return _RateProposal(self, members, [decay for decay, member in pairs for _ in member.parameters])

    def look_ahead_of(self, group: int, members: _Members, rate: float) -> list[Tensor]:
        """Return the look-ahead of a group's parameters at a rate; the optimizer has stepped."""
        if self.look_ahead == "step":
            return scaled(members.steps, rate / members.measured_at)
        fresh = [p in self._fresh for p in members.parameters]
        return tail_displacement(self.optimizer, self._groups[group], members.origin, members.parameters, fresh, rate)

    def first_look(self, proposal: Proposal, slope: Slope) -> None:
        """Search for the rate at which the look-ahead turns from better to worse; start at a tenth of it."""
        if not self.warm_start:
            return
        assert isinstance(proposal, _RateProposal)
        start = self.learned_rates()[0]

        turning_point = find_turning_point(lambda rate: slope(proposal.displacement(rate / start)), start, self.bounds)
        if turning_point is None:
            return
        best = max(turning_point / 10, self.bounds[0])
        with torch.no_grad():
            for index, parameter in enumerate(self._phi):
                ratio = self.learned_rates()[index] / start if self.per_group else 1.0
                parameter.fill_(math.log(best * ratio))
        self._show()

    @torch.no_grad()
    def meta_update(self, gradients: Sequence[Tensor]) -> None:
        """Move log eta, by at most ``max_change`` and within the bounds."""
        before = [float(parameter) for parameter in self._phi]
        super().meta_update(gradients)
        low, high = math.log(self.bounds[0]), math.log(self.bounds[1])
        limit = math.inf if self.max_change is None else self.max_change
        for parameter, old in zip(self._phi, before, strict=True):
            change = min(max(float(parameter) - old, -limit), limit)
            parameter.fill_(min(max(old + change, low), high))
        self._show()

    def after(self, loss: float, objective: float) -> list[str]:
        """Warn if a rate has reached one of its bounds."""
        low, high = math.log(self.bounds[0]), math.log(self.bounds[1])
        return [
            f"the learned rate of param group {index} has reached its bound {self.bounds[0 if value <= low else 1]:g}: "
            "widen bounds=, or look at the loss, the gradient may be zero or the objective unbounded"
            for index, value in enumerate(float(p) for p in self._phi)
            if value <= low or value >= high
        ]

    def detach(self) -> None:
        """Turn the param groups back into plain ones that keep the rates in force.

        A scheduler that computes rates from the base it was built with (LambdaLR, say) returns to that base at its next
        step: build it again after this. One that multiplies the rate, and OneCycleLR, continue from the rate in force.
        """
        for index, group in enumerate(self._groups):
            self.optimizer.param_groups[index] = group.plain()
        self._groups = []

    def state_dict(self) -> dict[str, Any]:
        """Return phi, the meta-optimizer, and each group's ratio and schedule factor."""
        return super().state_dict() | {
            "ratios": self._ratios,
            "factors": [group.factor for group in self._groups],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the learned rates; the optimizer's param groups have been replaced by loaded ones.

        The rates of an optimizer that was saved without apo become the learned ones.
        """
        if state is not None:
            self._adopt_groups()  # those that were added since the last step
            super().load_state_dict(state)
            self._ratios = list(state["ratios"])
            self._groups = []
            self._adopt_groups(state["factors"])
            return
        rates = [base_rate(group, self.optimizer) for group in self.optimizer.param_groups]
        self._groups = []
        self._first_rate = rates[0]
        self._ratios = [1.0 if self.per_group else rate / rates[0] for rate in rates]
        with torch.no_grad():
            for parameter, rate in zip(self._phi, rates, strict=False):
                parameter.fill_(math.log(rate))
        self._adopt_groups()

    def _phi_of(self, group: int) -> Tensor:
        return self._phi[group if self.per_group else 0]

    def _show(self) -> None:
        for group, rate in zip(self._groups, self.learned_rates(), strict=True):
            group.show(rate)

    def _measuring_rate(self, group: Mapping[str, Any]) -> float:
        # float16 ends at 65504; all other formats have room for a step thousands of times too large
        return 1.0 if any(p.dtype == torch.float16 for p in group["params"]) else _MEASURING_RATE

    def _adopt_groups(self, factors: Sequence[float] = ()) -> None:
        """Take over the optimizer's param groups that are not ours yet: at the start, after a load or an addition."""
        for index in range(len(self._groups), len(self.optimizer.param_groups)):
            group = self.optimizer.param_groups[index]
            if isinstance(group["lr"], Tensor) and any(other["lr"] is group["lr"] for other in self._groups):
                group["lr"] = group["lr"].clone()  # a default that torch gave to several groups
            factor = factors[index] if factors else None
            if index >= len(self._ratios):
                factor = self._learn_rate_of(group, index)
            rate = math.exp(float(self._phi_of(index))) * self._ratios[index]
            adopted = ScheduledGroup(group, self.optimizer, rate, factor)
            self.optimizer.param_groups[index] = adopted
            self._groups.append(adopted)

    def _learn_rate_of(self, group: Mapping[str, Any], index: int) -> float | None:
        """Learn one more group's rate; return the schedule's factor in it, or None for what the group itself shows."""
        rate, factor = base_rate(group, self.optimizer), None
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(
                f"lr of param group {index} must be positive, got {rate}: leave parameters that should not move out of "
                "the optimizer, or freeze them by requires_grad_(False) and give their group any rate"
            )
        if not self._phi:
            self._first_rate = rate
        ratio = rate / self._first_rate
        is_added = hasattr(self, "meta_optimizer")
        if is_added:
            if not self._is_default(rate):  # then it was chosen with the rates of today in mind
                ratio, factor = self._groups[0].compare(group)
            rate = ratio * self._groups[0].learned
        if not self._phi or self.per_group:
            self._phi.append(torch.tensor(math.log(rate), dtype=torch.float64))
            self._ratios.append(1.0)
            if is_added:  # one group, as if it had been there from the start
                self.meta_optimizer.param_groups[0]["params"].append(self._phi[-1])
        else:
            self._ratios.append(ratio)
        return factor

    def _is_default(self, rate: float) -> bool:
        default = self.optimizer.defaults.get("lr")
        return not isinstance(default, Tensor) and rate == default  # a tensor shows the first group's rate in force


def _check_numbers(over_relaxation: Any, max_change: Any, bounds: Any) -> None:
    """Raise unless the numbers among the rule's options are numbers that make sense."""
    if not isinstance(over_relaxation, Real):
        raise TypeError(f"over_relaxation must be a number, got {over_relaxation!r}: use 1 to turn it off")
    if not float(over_relaxation) > 0:
        raise ValueError(f"over_relaxation must be positive, got {over_relaxation}: use 1 to turn it off")
    if not isinstance(max_change, Real | None):
        raise TypeError(f"max_change must be a number, or None for no limit, got {max_change!r}")
    if max_change is not None and not float(max_change) > 0:
        raise ValueError(f"max_change must be positive or None, got {max_change}")
    if not (isinstance(bounds, tuple | list) and len(bounds) == 2 and all(isinstance(b, Real) for b in bounds)):
        raise TypeError(f"bounds must be a pair of numbers, got {bounds!r}: pass (1e-10, 1e4), for instance")
    if not 0 < bounds[0] < bounds[1] < math.inf:
        raise ValueError(f"bounds must be 0 < lowest < highest, got {bounds}")


@dataclass(frozen=True)
class _Members:
    """The parameters of one group that move, and how far the optimizer's own step took them."""

    parameters: list[Tensor]
    origin: list[Tensor]  # theta
    steps: list[Tensor]
    measured_at: float  # the rate of that step


class _RateProposal(Proposal):
    """A look-ahead along a direction that does not depend on the rate."""

    def __init__(self, rule: LearningRate, groups: list[_Members], coupled_decay: list[float]) -> None:
        super().__init__([p for members in groups for p in members.parameters], coupled_decay)
        self._rule = rule
        self._groups = groups
        self._last: tuple[list[float], list[list[Tensor]]] | None = None  # rates and displacement, group by group

    def displacement(self, factor: float = 1.0) -> list[Tensor]:
        """Return eta / sigma times the look-ahead direction, with eta scaled by ``factor``.

        Only the displacement is kept: the tail it is made of would be one vector more while the network runs.
        """
        rates = [factor * rate / self._rule.over_relaxation for rate in self._rule.learned_rates()]
        if self._last is None or self._last[0] != rates:
            self._last = None
            parts = [self._rule.look_ahead_of(i, self._groups[i], rate) for i, rate in enumerate(rates)]
            self._last = rates, parts
        return [tensor for part in self._last[1] for tensor in part]

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
        if any(p.dtype == torch.float16 for p in self.parameters):
            return None
        return norm([step for members in self._groups for step in members.steps])

    def take_step(self) -> None:
        """Move by the optimizer's own step at the rate in force now."""
        for members, rate in zip(self._groups, self._rule.rates(), strict=True):
            advance_(members.parameters, members.steps, rate / members.measured_at)
