r"""Learn SGD's learning rate and its momentum coefficient together.

The step of SGD with momentum is :math:`\Delta = -\eta\,(\mu b + g)` with the buffer :math:`b` of the step before. With
:math:`\phi = (\log\eta, \operatorname{logit}\mu)`,

.. math::
    \frac{\partial Q}{\partial \log\eta} = \langle h, \Delta \rangle, \qquad
    \frac{\partial Q}{\partial \operatorname{logit}\mu} = -\eta\,\mu(1-\mu)\,\langle h, b \rangle .

This rule is neither a rate nor a preconditioner: it is the pattern for a custom rule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from apo.rules.base import MetaOptimizerFactory, Outcome, Proposal, Rule, moving_parameters
from apo.rules.param_groups import ScheduledGroup, base_rate
from apo.vectors import dot, wide

__all__ = ["RateAndMomentum"]

#: RMSprop with bias correction, as for a learned rate alone, but slower.
META_OPTIMIZER = functools.partial(torch.optim.Adam, lr=0.05, betas=(0.0, 0.99))


class RateAndMomentum(Rule):
    """Learn ``lr`` and ``momentum`` of :class:`torch.optim.SGD`, the same for all param groups.

    It looks one step ahead, as the paper does, and so needs a larger ``fsd_weight`` than :class:`apo.LearningRate`.

    Args:
        optimizer: SGD with momentum, without Nesterov and dampening.
        meta_optimizer: Builds the meta-optimizer from a list of tensors; RMSprop with bias correction at 0.05.

    Example:
        >>> import apo, torch
        >>> model = torch.nn.Linear(4, 3)
        >>> rule = apo.RateAndMomentum(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
        >>> tuner = apo.APO(rule, model, torch.nn.functional.cross_entropy, interval=1)
        >>> for _ in range(3):
        ...     loss = tuner.step(torch.randn(8, 4), torch.randint(3, (8,)))
        >>> 0 < rule.optimizer.param_groups[0]["momentum"] < 1
        True
    """

    fsd_weight = 10.0
    optimizer: torch.optim.SGD

    def __init__(self, optimizer: torch.optim.SGD, meta_optimizer: MetaOptimizerFactory | None = None) -> None:
        if not isinstance(optimizer, torch.optim.SGD):
            raise TypeError(f"optimizer must be torch.optim.SGD, got {type(optimizer).__name__}")
        first = optimizer.param_groups[0]
        if any(not 0 < g["momentum"] < 1 or g["nesterov"] or g["dampening"] for g in optimizer.param_groups):
            found = ", ".join(f"{name}={first[name]}" for name in ("momentum", "nesterov", "dampening"))
            raise ValueError(f"optimizer must have 0 < momentum < 1, nesterov=False and dampening=0, got {found}")
        rate, momentum = base_rate(first, optimizer), first["momentum"]
        if not rate > 0:
            raise ValueError(f"lr of optimizer must be positive, got {rate}: apo learns its logarithm")
        self.optimizer = optimizer
        self._log_rate = torch.tensor(math.log(rate), dtype=torch.float64)
        self._logit = torch.tensor(math.log(momentum / (1 - momentum)), dtype=torch.float64)
        self._adopt_groups()
        self.meta_optimizer = (meta_optimizer or META_OPTIMIZER)(self.phi())
        self._buffers: dict[Tensor, Tensor] = {}

    def phi(self) -> list[Tensor]:
        """Return log eta and logit mu."""
        return [self._log_rate, self._logit]

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Keep the momentum buffers, which the step overwrites."""
        state = self.optimizer.state
        self._buffers = {p: state[p]["momentum_buffer"].clone() for p in state if "momentum_buffer" in state[p]}
        yield

    def propose(self, theta: Mapping[Tensor, Tensor]) -> Proposal:
        """Look one step ahead."""
        return _MomentumProposal(self.optimizer, self._log_rate, self._logit, self._buffers)

    def meta_update(self, gradients: Sequence[Tensor], outcome: Outcome | None = None) -> None:
        """Move phi and show it in the param groups."""
        super().meta_update(gradients)
        self._show()

    def before_step(self, fade: float = 1.0) -> None:
        """Take in new param groups and what schedulers wrote."""
        self._adopt_groups()
        for group in self._groups():
            group.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return phi, the meta-optimizer and the schedule's factors."""
        return super().state_dict() | {
            "factors": [group.factor for group in self._groups()],
            "by_hand": [group.by_hand for group in self._groups()],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore phi; the optimizer's groups have been loaded and are plain again.

        Rate and momentum of an optimizer that was saved without apo become the learned ones.
        """
        if state is not None:
            super().load_state_dict(state)
            self._adopt_groups(state["factors"], state.get("by_hand", ()))  # files of 0.1 do not have the last
            return
        first = self.optimizer.param_groups[0]
        with torch.no_grad():
            self._log_rate.fill_(math.log(base_rate(first, self.optimizer)))
            self._logit.fill_(math.log(first["momentum"] / (1 - first["momentum"])))
        self._adopt_groups()

    def detach(self) -> None:
        """Turn the param groups back into plain ones."""
        self.optimizer.param_groups[:] = [
            group.plain() if isinstance(group, ScheduledGroup) else group for group in self.optimizer.param_groups
        ]

    def _groups(self) -> list[ScheduledGroup]:
        return [group for group in self.optimizer.param_groups if isinstance(group, ScheduledGroup)]

    def _adopt_groups(self, factors: Sequence[float] = (), by_hand: Sequence[bool] = ()) -> None:
        """Take over param groups that are not ours yet."""
        for index, group in enumerate(self.optimizer.param_groups):
            if not isinstance(group, ScheduledGroup):
                rate, factor = math.exp(float(self._log_rate)), factors[index] if factors else None
                group["momentum"] = float(torch.sigmoid(self._logit))
                is_by_hand = by_hand[index] if index < len(by_hand) else False
                self.optimizer.param_groups[index] = ScheduledGroup(group, self.optimizer, rate, factor, is_by_hand)

    def _show(self) -> None:
        for group in self._groups():
            group.show(math.exp(float(self._log_rate)))
            group["momentum"] = float(torch.sigmoid(self._logit))


class _MomentumProposal(Proposal):
    """One step of SGD with momentum as a function of its rate and momentum."""

    def __init__(
        self, optimizer: torch.optim.SGD, log_rate: Tensor, logit: Tensor, old: Mapping[Tensor, Tensor]
    ) -> None:
        decay = {p: float(group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
        moving = moving_parameters(optimizer)
        super().__init__(moving, [decay[p] for p in moving])
        self._optimizer, self._log_rate, self._logit = optimizer, log_rate, logit
        self._old = [wide(old.get(p, torch.zeros_like(p))) for p in moving]  # b
        mu = self._mu
        # The step has left mu * b + g in the buffer; what the gradient (with its weight decay) added is g.
        states = [optimizer.state[p] for p in moving]
        self._gradients = [wide(s["momentum_buffer"]) - mu * b for s, b in zip(states, self._old, strict=True)]

    def displacement(self) -> list[Tensor]:
        """Return -eta (mu b + g)."""
        eta = math.exp(float(self._log_rate))
        return [-eta * buffer for buffer in self._buffers()]

    def pull_back(self, cotangent: Sequence[Tensor]) -> list[Tensor]:
        """Return the derivatives with respect to log eta and logit mu."""
        eta, mu = math.exp(float(self._log_rate)), self._mu
        return [dot(cotangent, self.displacement()), -eta * (mu * (1 - mu)) * dot(cotangent, self._old)]

    @torch.no_grad()
    def take_step(self) -> None:
        """Move the weights and set the buffers, as SGD with the new coefficients would have."""
        optimizer = self._optimizer
        rates = {p: float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        for p, buffer in zip(self.parameters, self._buffers(), strict=True):
            optimizer.state[p]["momentum_buffer"].copy_(buffer)
            p.copy_(wide(p) - rates[p] * buffer)

    def summary(self) -> dict[str, float]:
        """Return the momentum coefficient."""
        return {"momentum": self._mu}

    @property
    def _mu(self) -> float:
        return float(torch.sigmoid(self._logit))

    def _buffers(self) -> list[Tensor]:
        mu = self._mu
        return [mu * b + g for b, g in zip(self._old, self._gradients, strict=True)]
