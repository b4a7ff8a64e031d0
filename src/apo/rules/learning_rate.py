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
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.arguments import positive_number, positive_range
from apo.rules.base import MetaOptimizerFactory, Outcome, Proposal, Rule, Slope, Standing
from apo.rules.cadence import INTERVALS, Cadence
from apo.rules.linearity import check_linear_in_lr
from apo.rules.momentum import momentum_of
from apo.rules.over_relaxation import OverRelaxation
from apo.rules.param_groups import ScheduledGroup, base_rate, is_scheduled
from apo.rules.progress import Progress
from apo.rules.tail import RateProposal, has_tail, measuring_rate
from apo.rules.turning_point import TurningPoint
from apo.rules.warm_start import NOTHING_TURNS, excess_of_first_step, first_turning_point, rate_of_a_tiny_step

__all__ = ["LearningRate"]

#: RMSprop with bias correction, which is Adam without its first moment.
META_OPTIMIZER = functools.partial(torch.optim.Adam, lr=0.1, betas=(0.0, 0.99))
#: The paper's, without bias correction.
PAPER_META_OPTIMIZER = functools.partial(torch.optim.RMSprop, lr=0.1)
#: Over-relaxation where it is not measured, and the share of the other batch where it is.
_CONSTANT, _SHARE = 1.4, 0.3
#: Where a rate continues that parameters which join do not bear, relative to the turning point; a tenth cost more.
_NEWCOMERS = 0.3


class LearningRate(Rule):
    r"""Learn the learning rate of ``optimizer`` while it trains.

    Coupled weight decay (``weight_decay`` of SGD, Adam, RMSprop, ...) is an L2 penalty and belongs to the loss term of
    Q; decoupled decay (AdamW, Muon) is part of the step and scales with the learned rate.

    Args:
        optimizer: Any torch optimizer whose step is linear in ``lr``. Its rates are where the search begins; with
            the warm start they hardly matter.
        per_group: Learn one rate for each param group instead of one for all.
        look_ahead: ``"tail"``, or ``"step"`` (the paper's), along which the batches are not compared.
        over_relaxation: :math:`\sigma`; ``"auto"`` measures how much there may be, see
            :mod:`apo.rules.over_relaxation`.
        meta_optimizer: Builds the meta-optimizer from a list of tensors; RMSprop with bias correction at 0.1.
        max_change: Largest change of :math:`\log\eta` in one step of the meta-optimizer; None for no limit. The step to
            the turning point, which replaces it by default, has limits of its own.
        bounds: Smallest and largest learned rate.
        warm_start: Find the scale of the rate on the first batch before any weight moves, and start at a tenth of it,
            or at a hundredth if meta-steps come at every step at first (``interval="auto"``).
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
        over_relaxation: float | str = "auto",
        meta_optimizer: MetaOptimizerFactory | None = None,
        max_change: float | None = 0.2,
        bounds: tuple[float, float] = (1e-10, 1e4),
        warm_start: bool = True,
        check_linear: bool = True,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if look_ahead not in ("tail", "step"):
            raise ValueError(f"look_ahead must be 'tail' or 'step', got {look_ahead!r}")
        _check_options(over_relaxation, max_change, bounds, meta_optimizer)
        if check_linear:
            check_linear_in_lr(optimizer)
        self.optimizer = optimizer
        self.per_group = per_group
        self._momentum = momentum_of(optimizer) if look_ahead == "tail" and not has_tail(optimizer) else None
        self.look_ahead = look_ahead if has_tail(optimizer) or self._momentum else "step"
        self.compares = over_relaxation == "auto" and look_ahead == "tail"
        if self.compares:
            self.other_batch_share, self.auto_intervals = _SHARE, INTERVALS
        self._relaxation = OverRelaxation.of(optimizer.param_groups) if self.compares else None
        self._constant = _CONSTANT if over_relaxation == "auto" else float(over_relaxation)
        self._turning_point = TurningPoint() if self.compares and meta_optimizer is None and not per_group else None
        self.max_change, self.bounds, self.warm_start = max_change, bounds, warm_start
        self._groups: list[ScheduledGroup] = []
        self._phi: list[Tensor] = []
        self._ratios: list[float] = []  # rate of each group relative to its phi
        self._first_rate = 1.0  # what the user gave the first group
        self._progress = Progress()
        self._cadence = Cadence()
        self._fade = 1.0  # the end of training, see `before_step`
        self._is_flat = False  # whether the last meta-gradient was exactly zero
        self._sentences: list[str] = []  # what the warm start found, for `after`
        self._fresh: set[Tensor] = set()  # parameters without optimizer state before the step that is measured
        self._tails: dict[Tensor, Tensor] = {}  # the tails of an optimizer that is not known, per unit of the rate
        self._adopt_groups()
        self.meta_optimizer = (meta_optimizer or META_OPTIMIZER)(self._phi)

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
        settings: dict[str, Any] = {"look_ahead": "step", "over_relaxation": 1.0, "max_change": None}
        return cls(optimizer, **(settings | {"meta_optimizer": PAPER_META_OPTIMIZER, "warm_start": False} | options))

    @property
    def interval(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """1 while every step is a meta-step."""
        return 1 if self._cadence.is_start else None

    @property
    def over_relaxation(self) -> float:
        r"""The :math:`\sigma` in force."""
        return self._constant if self._relaxation is None else self._relaxation.value

    @property
    def _rests(self) -> bool:
        """Whether the rate may only fall, because training ends."""
        return self._turning_point is not None and self._progress.has_begun and self._cadence.rests(self._fade)

    @property
    def _part(self) -> float:
        """The part of the learned rate at which the look-ahead is made: less than 1 only if batches are compared."""
        if not (self._turning_point and self._turning_point.has_looked and self._progress.has_begun):
            return 1.0
        return self._cadence.part(max((group.factor for group in self._groups), default=1.0), self._fade)

    def phi(self) -> list[Tensor]:
        """Return log eta: 0-dimensional float64 tensors on the CPU."""
        return self._phi

    def learned_rates(self) -> list[float]:
        """Return the learned rate of each param group, before the factor of a scheduler."""
        return [math.exp(float(self._phi[i if self.per_group else 0])) * ratio for i, ratio in enumerate(self._ratios)]

    def rates_ahead(self) -> list[float]:
        """Return the rate of each param group at which the look-ahead is made."""
        return [rate * self._part / self.over_relaxation for rate in self.learned_rates()]

    def before_step(self, fade: float = 1.0) -> None:
        """Take in new param groups, what schedulers wrote and, if there are none, the end of training."""
        for group in self._groups:
            group.settle()
        if len(self._groups) != len(self.optimizer.param_groups):
            self._adopt_groups()
        if fade != self._fade and not is_scheduled(self.optimizer):
            self._fade = fade
            self._show()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Let the optimizer step at a rate at which its step can be measured precisely."""
        self._fresh = {p for group in self._groups for p in group["params"] if not self.optimizer.state.get(p)}
        self._tails = self._momentum.tails(self.optimizer) if self._momentum else {}
        for group in self._groups:
            group.use(measuring_rate(group))
        try:
            yield
        finally:
            self._show()

    def propose(self, theta: Mapping[Tensor, Tensor]) -> Proposal:
        """Measure the step d and look ahead along it or along the tail."""
        return RateProposal(self, self._groups, theta, self._fresh, self._tails)

    def first_look(self, proposal: Proposal, slope: Slope, often: bool = False, newcomers: bool = False) -> None:
        """Search for the rate at which the look-ahead turns from better to worse; start, or continue, below it."""
        if not self.warm_start:
            return
        assert isinstance(proposal, RateProposal)
        start = self.learned_rates()[0]
        tiny = rate_of_a_tiny_step(proposal.displacement(), proposal.parameters, start)
        if tiny is None:
            return  # the gradient is zero, of which `after` will tell
        turn = first_turning_point(lambda rate: slope(proposal.displacement(rate / start)), tiny, self.bounds)
        if newcomers:
            part = self._part / (self._fade if self._rests else 1.0)  # a schedule may rise again, the end does not
            if turn is not None and turn * part < start:
                self._shift(math.log(_NEWCOMERS * turn * part / start))
            return
        found = 10 * tiny if turn is None else turn / (100 if often else 10)
        found = min(max(found, self.bounds[0]), self.bounds[1])
        if turn is None:
            self._sentences.append(NOTHING_TURNS.format(10 * tiny))
        elif often:
            self._cadence.start()
            self._progress.hold(math.log(found), math.log(turn / 10 * excess_of_first_step(self.optimizer)))
        with torch.no_grad():
            for index, parameter in enumerate(self._phi):
                ratio = self.learned_rates()[index] / start if self.per_group else 1.0
                parameter.fill_(math.log(found * ratio))
        self._show()

    @torch.no_grad()
    def meta_update(self, gradients: Sequence[Tensor], outcome: Outcome | None = None) -> None:
        """Move log eta to the turning point, or by the meta-optimizer, at most by ``max_change``; within the bounds."""
        before = [float(parameter) for parameter in self._phi]
        self._is_flat = all(float(gradient) == 0.0 for gradient in gradients)
        change = None  # of log eta, if the batches say where the look-ahead turns
        if outcome is not None and self._relaxation is not None:
            rate, ahead, part = self.learned_rates()[0], self.rates_ahead()[0], self._part  # with its sigma
            self._relaxation.observe(outcome, self._progress.has_begun)
            if self._turning_point is not None and outcome.comparison is not None:
                pace = self._cadence.pace(outcome.step, outcome.pace)
                change = self._turning_point.change(
                    outcome.comparison, outcome.share, ahead, self.over_relaxation, rate, outcome.resolution, pace, part
                )
        if change is None:
            super().meta_update(gradients)
        else:
            self._phi[0].add_(change)
        low, high = math.log(self.bounds[0]), math.log(self.bounds[1])
        limit = self.max_change if change is None and self.max_change is not None else math.inf
        rise = 0.0 if self._rests else limit
        for parameter, old in zip(self._phi, before, strict=True):
            parameter.fill_(min(max(old + min(max(float(parameter) - old, -limit), rise), low), high))
        self._show()

    def after(self, outcome: Outcome) -> list[str]:
        """Lower a rate that has climbed without progress; warn of that, of a flat objective and of a reached bound."""
        sentences, self._sentences = self._sentences, []
        if self._is_flat and not self._progress.is_learned(outcome.loss):
            sentences.append(
                "the meta-gradient is exactly zero, so there is nothing to learn from: the gradients are all zero, or "
                "the loss does not depend on the weights (dead ReLUs, saturated outputs, frozen or detached layers)"
            )
        highest, had_begun = max(float(parameter) for parameter in self._phi), self._progress.has_begun
        lag = self._turning_point.lag if self._turning_point else 0.0
        allowed = self._progress.observe(outcome, highest)
        self.standing = self._progress.standing
        if allowed < highest:
            self._shift(allowed - highest)
        if self.standing is Standing.LOST:  # what they know is of a network that is no more
            self.meta_optimizer.state.clear()
            self._turning_point = self._turning_point and TurningPoint()
        starts_again = self._progress.has_begun > had_begun or self.standing is Standing.LOST
        self._cadence.observe(outcome.step, lag, starts_again, hurries=not self._progress.on_plateau)
        sentences += self._progress.sentences(outcome.can_go_back)
        low, high = math.log(self.bounds[0]), math.log(self.bounds[1])
        return sentences + [
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
            "by_hand": [group.by_hand for group in self._groups],
            "progress": self._progress.state_dict(),
            "cadence": self._cadence.state_dict(),
            "fade": self._fade,
            "relaxation": None if self._relaxation is None else self._relaxation.state_dict(),
            "turning_point": None if self._turning_point is None else self._turning_point.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the learned rates; the optimizer's param groups have been replaced by loaded ones.

        The rates of an optimizer that was saved without apo become the learned ones.
        """
        if state is not None:
            self._adopt_groups()  # those that were added since the last step
            super().load_state_dict(state)
            self._ratios = list(state["ratios"])
            self._fade = float(state.get("fade", 1.0))  # files of 0.1 have neither this nor the next four
            parts = {"relaxation": self._relaxation, "turning_point": self._turning_point, "cadence": self._cadence}
            for name, part in parts.items():
                if part is not None and state.get(name):
                    part.load_state_dict(state[name])
            self._progress.load_state_dict(state.get("progress", {}))
            self._groups = []
            self._adopt_groups(state["factors"], state.get("by_hand", ()))  # files of 0.1 do not have the last
            return
        rates = [base_rate(group, self.optimizer) for group in self.optimizer.param_groups]
        self._groups = []
        self._first_rate = rates[0]
        self._ratios = [1.0 if self.per_group else rate / rates[0] for rate in rates]
        with torch.no_grad():
            for parameter, rate in zip(self._phi, rates, strict=False):
                parameter.fill_(math.log(rate))
        self._adopt_groups()

    @torch.no_grad()
    def _shift(self, change: float) -> None:
        for parameter in self._phi:
            parameter.add_(change)
        self._show()

    def _show(self) -> None:
        for group, rate in zip(self._groups, self.learned_rates(), strict=True):
            group.show(rate * self._fade)

    def _adopt_groups(self, factors: Sequence[float] = (), by_hand: Sequence[bool] = ()) -> None:
        """Take over the optimizer's param groups that are not ours yet: at the start, after a load or an addition."""
        for index in range(len(self._groups), len(self.optimizer.param_groups)):
            group = self.optimizer.param_groups[index]
            if isinstance(group["lr"], Tensor) and any(other["lr"] is group["lr"] for other in self._groups):
                group["lr"] = group["lr"].clone()  # a default that torch gave to several groups
            factor = factors[index] if factors else None
            if index >= len(self._ratios):
                factor = self._learn_rate_of(group, index)
            rate = self.learned_rates()[index] * self._fade
            is_by_hand = by_hand[index] if index < len(by_hand) else False
            self._groups.append(ScheduledGroup(group, self.optimizer, rate, factor, is_by_hand))
            self.optimizer.param_groups[index] = self._groups[-1]

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
            default = self.optimizer.defaults.get("lr")  # as a tensor it shows the first group's rate in force
            if isinstance(default, Tensor) or rate != default:  # then it was chosen with the rates of today in mind
                ratio, factor = self._groups[0].compare(group)
            rate = ratio * self._groups[0].learned / self._fade
        if not self._phi or self.per_group:
            self._phi.append(torch.tensor(math.log(rate), dtype=torch.float64))
            self._ratios.append(1.0)
            if is_added:  # one group, as if it had been there from the start
                self.meta_optimizer.param_groups[0]["params"].append(self._phi[-1])
        else:
            self._ratios.append(ratio)
        return factor


def _check_options(over_relaxation: Any, max_change: Any, bounds: Any, meta_optimizer: Any) -> None:
    """Raise unless the options of a learned rate make sense."""
    if over_relaxation != "auto":
        positive_number("over_relaxation", over_relaxation, "use 1 to turn it off", "or 'auto'")
    if max_change is not None:
        positive_number("max_change", max_change, alternative="or None")
    positive_range("bounds", bounds, "pass (1e-10, 1e4), for instance")
    if not (meta_optimizer is None or callable(meta_optimizer)):
        raise TypeError(
            f"meta_optimizer must be a function that builds an optimizer from a list of tensors, got "
            f"{type(meta_optimizer).__name__}: pass functools.partial(torch.optim.Adam, lr=0.1), for instance"
        )
