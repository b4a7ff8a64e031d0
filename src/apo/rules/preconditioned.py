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
from apo.rules.base import MetaOptimizerFactory, Outcome, Proposal, Rule, Slope
from apo.rules.param_groups import is_scheduled
from apo.rules.warm_start import first_turning_point, rate_of_a_tiny_step

__all__ = ["Preconditioned", "meta_adam"]

#: How far below a tiny step, and how far above it, a scale of P is searched for.
_SEARCH_DEPTH = 1e-10
#: Steps that the guard may wait before the user hears of it, however short the warm-up was.
_LONG_WAIT = 300
#: Where an eigenbasis starts, relative to the turning point, and how often it then learns.
EIGENBASIS_START = 0.3
EIGENBASIS_INTERVALS = ((50, 1), (math.inf, 10))
#: Its weights of the function-space and the weight-space term.
EIGENBASIS_WEIGHTS = (0.3, 0.1)


class Preconditioned(Rule):
    r"""Learn the preconditioner of ``optimizer`` while it trains.

    While the optimizer warms up (another optimizer moves the weights), P is learned already. A *guard* hands over to P
    not at a step count alone but once the look-ahead has lowered Q at ``patience`` meta-steps in a row: a P that has
    not yet shrunk where curvature is high would destroy the network at that moment.

    Args:
        optimizer: :class:`apo.Kronecker`, :class:`apo.Eigenbasis`, :class:`apo.Diagonal`, :class:`apo.Full` or another
            preconditioner.
        meta_optimizer: Builds the meta-optimizer from a list of tensors; Adam at 1e-3, or 0.03 for the logarithms of an
            eigenbasis.
        guard: Hand over only when the look-ahead lowers Q.
        patience: At how many meta-steps in a row it has to.
        warmup_interval: Interval between meta-steps during the warm-up, None for the tuner's. 1 helps a great deal.
        warm_start: Scale P on the first batch, before any weight moves, to ``warm_start`` times the point at which the
            look-ahead along the gradient turns from better to worse; None to start at the optimizer's lr as it is.
            ``"auto"`` is 0.3 for an eigenbasis, whose rates grow from there at each of the first 50 steps, else None.

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
        super().meta_update(gradients, outcome)
        for layer in self.optimizer.layers:
            layer.block.constrain()

    def measuring(self) -> AbstractContextManager[None]:
        """Hold the optimizer's step back: the proposal takes it once P has been updated."""
        return self.optimizer.deferring()

    def propose(self, theta: Mapping[Tensor, Tensor]) -> Proposal:
        """Look ahead along the preconditioned gradient."""
        return _PreconditionedProposal(self.optimizer)

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
        """Hand over once the warm-up has elapsed and the look-ahead helps; warn if that does not happen."""
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

    def detach(self) -> None:
        """Leave the preconditioner as it is: fixed from now on."""
        self.optimizer.wait_for_hand_over(False)

    def state_dict(self) -> dict[str, Any]:
        """Return the meta-optimizer and the guard's count; the factors are in the optimizer's own state."""
        return {"meta_optimizer": self.meta_optimizer.state_dict(), "streak": self._streak, "fade": self._fade}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the meta-optimizer and the guard's count."""
        if state is not None:
            self.meta_optimizer.load_state_dict(state["meta_optimizer"])
            self._streak = int(state["streak"])
            self._fade = float(state.get("fade", 1.0))


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


#: The default meta-optimizer, the one for two numbers a layer (whose gradients shrink with the loss), and the paper's.
META_OPTIMIZER = functools.partial(meta_adam, lr=1e-3)
EIGENBASIS_META_OPTIMIZER = functools.partial(meta_adam, lr=0.03, eps=1e-12)
PAPER_META_OPTIMIZER = functools.partial(meta_adam, lr=1e-4)


class _PreconditionedProposal(Proposal):
    """The look-ahead -P g, and the step that was held back."""

    def __init__(self, optimizer: Preconditioner) -> None:
        moving = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        coupled = [0.0 if group["decoupled_weight_decay"] else float(group["weight_decay"]) for _, group in moving]
        super().__init__([p for p, _ in moving], coupled)
        self._optimizer = optimizer
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
        return self._optimizer.pull_back(cotangent)

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
