"""One look-ahead of a learning-rate rule: along a direction that does not depend on the rate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from apo.rules.base import Proposal
from apo.vectors import advance_, dot, norm

if TYPE_CHECKING:
    from apo.rules.learning_rate import LearningRate

__all__ = ["Members", "RateProposal"]


@dataclass(frozen=True)
class Members:
    """The parameters of one group that move, and how far the optimizer's own step took them."""

    parameters: list[Tensor]
    origin: list[Tensor]  # theta
    steps: list[Tensor]
    measured_at: float  # the rate of that step


class RateProposal(Proposal):
    """A look-ahead along a direction that does not depend on the rate."""

    def __init__(self, rule: LearningRate, groups: list[Members], coupled_decay: list[float]) -> None:
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
