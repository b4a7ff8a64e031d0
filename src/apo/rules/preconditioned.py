r"""Learn the matrices of a preconditioner.

:math:`\phi` are the factors of :math:`P` and :math:`\Delta(\phi) = -P(\phi)\, g`, so that
:math:`\nabla_\phi Q` is the pull-back of :math:`h` through the factors: closed forms in matrix products, without
inverses or eigendecompositions (section 4.4 of the paper). On a meta-iteration the optimizer's own step waits until
P has been updated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from apo.arguments import whole_number
from apo.preconditioners import Eigenbasis, Preconditioner
from apo.rules.base import Comparison, MetaOptimizerFactory, Outcome, Proposal, Rule, Slope
from apo.rules.param_groups import is_scheduled
from apo.rules.turning_point import TurningPoint
from apo.rules.warm_start import first_turning_point, rate_of_a_tiny_step
from apo.vectors import dot

__all__ = ["Preconditioned", "meta_adam"]

#: How far below a tiny step, and how far above it, a scale of P is searched for.
_SEARCH_DEPTH = 1e-10
#: Steps that the guard may wait before it warns, however short the warm-up was.
_LONG_WAIT = 300
#: Where an eigenbasis starts, relative to the turning point, and how often it then learns.
EIGENBASIS_START = 0.3
EIGENBASIS_INTERVALS = ((50, 1), (math.inf, 10))
#: Its weights of the function-space and the weight-space term, and the share of the other batch in the loss term.
EIGENBASIS_WEIGHTS = (0.3, 0.1)
EIGENBASIS_SHARE = 0.3
#: How far beyond the turning point all its rates go together. There the rates and dampings of single layers see what
#: they should change relative to each other; at 1.4 times it, the dampings grew to make up for it.
_TARGET = 1.0


class Preconditioned(Rule):
    r"""Learn the preconditioner of ``optimizer`` while it trains.

    While the optimizer warms up (another optimizer moves the weights), P is learned already. A *guard* hands over to P
    not at a step count alone but once the look-ahead has lowered Q at ``patience`` meta-steps in a row: a P that has
    not yet shrunk where curvature is high would destroy the network at that moment.

    Args:
        optimizer: :class:`apo.Kronecker`, :class:`apo.Eigenbasis`, :class:`apo.Diagonal`, :class:`apo.Full` or another
            preconditioner.
        meta_optimizer: Builds the meta-optimizer from a list of tensors; Adam at 1e-3. An eigenbasis has Adam at 0.1
            for its logarithms, on meta-gradients relative to the promise of the step, and beside it a step to the
            turning point for all rates together (below); a custom one replaces both.
        guard: Hand over only when the look-ahead lowers Q.
        patience: At how many meta-steps in a row it has to.
        warmup_interval: Interval between meta-steps during the warm-up, None for the tuner's. 1 helps a great deal.
        warm_start: Scale P on the first batch, before any weight moves, to ``warm_start`` times the point at which the
            look-ahead along the gradient turns from better to worse; None to start at the optimizer's lr as it is.
            ``"auto"`` is 0.3 for an eigenbasis, whose rates grow from there at each of the first 50 steps, else None.

    **The rates of an eigenbasis** may be wrong by orders of magnitude, and alike in all layers. One number cures that,
    and needs no meta-rate: the scale of P at which Q turns from better to worse along the look-ahead. With Q at both
    ends and its slope :math:`d = \langle h, \Delta \rangle`, a quadratic model has the promise
    :math:`a = d - 2 (Q' - Q)` and the price :math:`c = 2 (d - (Q' - Q))`, and turns at a/c times the present scale. All
    rates go 0.3 of the way there at each meta-step, up by at most 10%
    (:class:`apo.rules.turning_point.TurningPoint`). What layers need beside that is left to the meta-optimizer. It
    sees meta-gradients divided by the promise :math:`\langle g, P g \rangle`, which are as large at the end as at the
    beginning. Absolute ones shrink with the loss, and Adam, which remembers the first ones, would stop after a few
    steps.

    An eigenbasis fades if the tuner knows ``total_steps``: over the second half its steps fall linearly to zero, unless
    a scheduler is at work. Then ``param_groups[i]["lr"]`` falls with them.

    Example:
        >>> import apo, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> rule = apo.Preconditioned(apo.Kronecker(model, lr=0.1))
        >>> tuner = apo.APO(rule, model, torch.nn.functional.cross_entropy)
        >>> loss = tuner.step(torch.randn(8, 4), torch.randint(3, (8,)))
        >>> sorted(tuner.history[0].summary)
        ['P/max', 'P/mean', 'P/min']
    """

    fsd_weight = 0.1
    wsd_weight = 0.3
    optimizer: Preconditioner

    def __init__(
        self,
        optimizer: Preconditioner,
        *,
        meta_optimizer: MetaOptimizerFactory | None = None,
        guard: bool = True,
        patience: int = 3,
        warmup_interval: int | None = None,
        warm_start: float | str | None = "auto",
    ) -> None:
        if not isinstance(optimizer, Preconditioner):
            raise TypeError(f"optimizer must be an apo preconditioner, got {type(optimizer).__name__}")
        two_numbers = isinstance(optimizer, Eigenbasis)
        if warm_start == "auto":
            warm_start = EIGENBASIS_START if two_numbers else None
        if warm_start is not None and not (isinstance(warm_start, (int, float)) and warm_start > 0):
            raise ValueError(f"warm_start must be positive, None or 'auto', got {warm_start!r}")
        if two_numbers:
            self.auto_intervals = EIGENBASIS_INTERVALS
            self.fsd_weight, self.wsd_weight = EIGENBASIS_WEIGHTS
            self.other_batch_share = EIGENBASIS_SHARE
        self.optimizer = optimizer
        self.split = optimizer.ownership.size > 1  # each process keeps the factors of some blocks only
        self.optimizer.wait_for_hand_over(guard and optimizer.warmup is not None)
        self.patience = whole_number("patience", patience, "use guard=False to hand over by step count")
        self.warmup_interval = None if warmup_interval is None else whole_number("warmup_interval", warmup_interval)
        self.warm_start = warm_start
        usual = EIGENBASIS_META_OPTIMIZER if two_numbers else META_OPTIMIZER
        self.meta_optimizer = (meta_optimizer or usual)(
            self.phi() or [torch.zeros(0)]  # a process that keeps no block
        )
        self._turning_point = TurningPoint() if two_numbers and meta_optimizer is None else None
        self._log_scale = 0.0  # how far all rates have gone together
        self._proposal: _PreconditionedProposal | None = None  # of the meta-step at work
        self._slope: Tensor | None = None  # of Q along its look-ahead, once phi has moved with it
        self._streak = 0
        self._fade = 1.0  # the end of training

    @classmethod
    def paper(cls, optimizer: Preconditioner, **options: Any) -> Preconditioned:
        """Build the rule with the paper's settings (section 5.1): Adam at 1e-4, hand-over by step count alone.

        The paper's optimizer starts at the identity and warms up for 3,000 steps:
        ``Kronecker(model, lr=1.0, scale=0.9, warmup=SGD(..., momentum=0.9), warmup_steps=3000)``.

        Example:
            >>> import apo, torch
            >>> rule = apo.Preconditioned.paper(apo.Kronecker(torch.nn.Linear(2, 2), lr=1.0))
            >>> rule.meta_optimizer.param_groups[0]["lr"]
            0.0001
        """
        return cls(optimizer, **({"meta_optimizer": PAPER_META_OPTIMIZER, "guard": False} | options))

    @property
    def interval(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The warm-up's own interval while it lasts, unless it does not end: then it would stay costly."""
        if self.warmup_interval is None or not self.optimizer.warming_up or self._overdue:
            return None
        return self.warmup_interval

    @property
    def _overdue(self) -> bool:
        """Whether the guard, if P still waits for it, has delayed P for longer than the warm-up itself."""
        waited = self.optimizer.steps - self.optimizer.warmup_steps
        return waited > max(self.optimizer.warmup_steps, _LONG_WAIT)

    def phi(self) -> list[Tensor]:
        """Return the factors of all blocks that this process keeps."""
        return self.optimizer.factors()

    def before_step(self, fade: float = 1.0) -> None:
        """Let the steps of an eigenbasis fall at the end of training, unless a scheduler does so."""
        if fade != self._fade and isinstance(self.optimizer, Eigenbasis) and not is_scheduled(self.optimizer):
            for group in self.optimizer.param_groups:
                group["lr"] *= fade / self._fade
            self._fade = fade

    def meta_update(self, gradients: Sequence[Tensor], outcome: Outcome | None = None) -> None:
        """Move phi, within the range that its blocks allow."""
        if self._turning_point is not None and self._proposal is not None:
            gradients = self._proposal.relative(gradients)
            self._slope = self._proposal.slope
        super().meta_update(gradients, outcome)
        for layer in self.optimizer.layers:
            layer.block.constrain()

    def measuring(self) -> AbstractContextManager[None]:
        """Hold the optimizer's step back: the proposal takes it once P has been updated."""
        return self.optimizer.deferring()

    def propose(self, theta: Mapping[Tensor, Tensor]) -> Proposal:
        """Look ahead along the preconditioned gradient."""
        self._proposal = _PreconditionedProposal(self.optimizer, measures=self._turning_point is not None)
        return self._proposal

    def first_look(self, proposal: Proposal, slope: Slope, often: bool = False, newcomers: bool = False) -> None:
        """Scale P so that the first look-ahead is a good one."""
        if self.warm_start is None or newcomers:  # these have blocks of their own
            return
        assert isinstance(proposal, _PreconditionedProposal)
        ahead = proposal.displacement()
        tiny = rate_of_a_tiny_step(ahead, proposal.parameters, 1.0)
        if tiny is None:
            return
        found = first_turning_point(
            lambda factor: slope([delta * factor for delta in ahead]),
            tiny,
            (_SEARCH_DEPTH * tiny, tiny / _SEARCH_DEPTH),
        )
        if found is not None:
            self.optimizer.rescale(self.warm_start * found)
            proposal.look_ahead()

    def after(self, outcome: Outcome) -> list[str]:
        """Scale P; hand over once the warm-up has elapsed and the look-ahead helps; warn if that does not happen."""
        self._go_to_turning_point(outcome)
        self._streak = self._streak + 1 if outcome.objective < outcome.loss else 0
        optimizer = self.optimizer
        if not optimizer.warming_up:
            return []
        if optimizer.warmup_elapsed and self._streak >= self.patience:
            optimizer.hand_over()
        if not (optimizer.warming_up and self._overdue):
            return []
        return [
            f"the warm-up of {optimizer.warmup_steps} steps does not end, because looking ahead along P g does "
            f"not lower Q at {self.patience} meta-steps in a row: lower the meta-rate (wide layers want less), raise "
            "wsd_weight, lower lr, or hand over all the same with guard=False"
        ]

    @torch.no_grad()
    def _go_to_turning_point(self, outcome: Outcome) -> None:
        """Scale all rates of an eigenbasis alike, by what Q and its slope say about this look-ahead."""
        found, self._slope = self._slope, None
        self._proposal = None  # which holds a vector as long as the weights
        if self._turning_point is None or found is None:
            return
        assert isinstance(self.optimizer, Eigenbasis)
        slope, rise, scale = float(found), outcome.objective - outcome.loss, math.exp(self._log_scale)
        quadratic = Comparison(slope - 2.0 * rise, 2.0 * (slope - rise), 0.0, 0.0, 0.0)
        change = self._turning_point.change(quadratic, 0.0, scale, _TARGET, scale, outcome.resolution)
        if change is not None:
            self._log_scale += change
            self.optimizer.scale_rates(change)

    def detach(self) -> None:
        """Leave the preconditioner as it is: fixed from now on."""
        self.optimizer.wait_for_hand_over(False)

    def state_dict(self) -> dict[str, Any]:
        """Return the meta-optimizer, the turning point and the guard; the factors are in the optimizer's own state."""
        return {
            "meta_optimizer": self.meta_optimizer.state_dict(),
            "streak": self._streak,
            "fade": self._fade,
            "turning_point": None if self._turning_point is None else self._turning_point.state_dict(),
            "log_scale": self._log_scale,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the meta-optimizer, the turning point and the guard's count."""
        if state is not None:
            self.meta_optimizer.load_state_dict(state["meta_optimizer"])
            self._streak = int(state["streak"])
            self._fade = float(state.get("fade", 1.0))  # files of 0.1 have neither this nor the next two
            if self._turning_point is not None and state.get("turning_point"):
                self._turning_point.load_state_dict(state["turning_point"])
            self._log_scale = float(state.get("log_scale", 0.0))


def meta_adam(
    phi: list[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> torch.optim.Adam:
    """Build Adam; on a GPU with each factor read and written once, because factors are larger than the network.

    Example:
        >>> meta_adam([torch.zeros(2)], lr=1e-3).param_groups[0]["lr"]
        0.001
    """
    on_gpu = all(factor.is_cuda for factor in phi)
    return torch.optim.Adam(phi, lr=lr, betas=betas, eps=eps, fused=True if on_gpu else None)


#: The default meta-optimizer, the one for two numbers a layer (whose gradients are relative), and the paper's.
META_OPTIMIZER = functools.partial(meta_adam, lr=1e-3)
EIGENBASIS_META_OPTIMIZER = functools.partial(meta_adam, lr=0.1, betas=(0.9, 0.9), eps=1e-12)
PAPER_META_OPTIMIZER = functools.partial(meta_adam, lr=1e-4)


class _PreconditionedProposal(Proposal):
    """The look-ahead -P g, and the step that was held back.

    Args:
        optimizer: The preconditioner.
        measures: Whether the slope is wanted.

    Attributes:
        slope: How fast Q rises at the end of the look-ahead along it, once :meth:`pull_back` was called.
    """

    slope: Tensor

    def __init__(self, optimizer: Preconditioner, measures: bool = False) -> None:
        moving = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        coupled = [0.0 if group["decoupled_weight_decay"] else float(group["weight_decay"]) for _, group in moving]
        super().__init__([p for p, _ in moving], coupled)
        self._optimizer, self._measures = optimizer, measures
        self.wants_sampled_gradients = optimizer.wants_sampled_gradients
        self.look_ahead()

    def look_ahead(self) -> None:
        """Compute the displacement, with the P of now."""
        self._displacement = self._optimizer.displacement()

    def displacement(self) -> list[Tensor]:
        """Return -P g."""
        return self._displacement

    def pull_back(self, cotangent: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the factors."""
        if self._measures:
            self.slope = dot(cotangent, self._displacement)
        return self._optimizer.pull_back(cotangent)

    @torch.no_grad()
    def relative(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return meta-gradients relative to the promise of the look-ahead, each at most 1 in size."""
        promise = dot([p.grad for p in self.parameters], self._displacement).abs()  # type: ignore[misc]
        promise = promise.clamp_min(torch.finfo(promise.dtype).tiny)
        return [(gradient / promise.to(gradient.device)).clamp(-1.0, 1.0) for gradient in gradients]

    def take_step(self) -> None:
        """Move the weights with the new P, or by the warm-up optimizer while it lasts."""
        self._optimizer.take_step()

    def observe_sampled(self, gradients: Sequence[Tensor]) -> None:
        """Hand the gradients to the optimizer."""
        self._optimizer.observe_sampled(dict(zip(self.parameters, gradients, strict=True)))

    def summary(self) -> dict[str, float]:
        """Return mean, smallest and largest mean eigenvalue of the layers' blocks, relative to the start."""
        values = list(self._optimizer.summary().values())
        everywhere = torch.stack([value.to(values[0].device) for value in values]).float()
        mean, low, high = torch.stack([everywhere.mean(), *everywhere.aminmax()]).tolist()
        return {"P/mean": mean, "P/min": low, "P/max": high}
