"""A meta-optimizer that notes the meta-gradients and moves phi only when told to, and by how much."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.rules import Rule


class Scripted(Optimizer):
    """Keeps every meta-gradient in `seen`; `nudge` is added to phi once."""

    def __init__(self, phi: list[Tensor]) -> None:
        super().__init__(phi, {})
        self.seen: list[list[Tensor]] = []
        self.nudge: Sequence[Tensor] | None = None

    @torch.no_grad()
    def step(self, closure=None):
        phi = self.param_groups[0]["params"]
        self.seen.append([p.grad.clone() for p in phi])
        for p, change in zip(phi, self.nudge or [], strict=False):
            p.add_(change)
        self.nudge = None

    def __getstate__(self):
        return dict(vars(self))  # torch's own would drop what is ours from a copy


def move_phi(rule: Rule, changes: Sequence[Tensor]) -> None:
    """Moves phi by `changes` the way a meta-update does, so that the rule shows it wherever it has to."""
    rule.meta_optimizer.nudge = changes
    rule.meta_update([torch.zeros_like(p) for p in rule.phi()])


def meta_gradients(rule: Rule) -> list[Tensor]:
    """Returns the gradient of Q at the last meta-step."""
    return rule.meta_optimizer.seen[-1]
