"""The Rosenbrock function as a training problem without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from apo.discrepancy import SquaredError
from apo_experiments.models.toy import Rosenbrock
from apo_experiments.problem import Batches, Problem
from apo_experiments.recipe import Setting

#: Options: where (x, y) begin, and after how many steps the place is recorded.
DEFAULTS: dict[str, Any] = {"start": (1.0, -1.5), "steps_per_epoch": 10}


def rosenbrock(options: Mapping[str, Any], setting: Setting) -> Problem:
    """Build the problem, in float64: minimise (1 - x)^2 + 100 (y - x^2)^2.

    Metrics are the value, called ``objective``, and ``x`` and ``y``.
    """
    model = Rosenbrock(options["start"], dtype=torch.float64).to(setting.device)
    stream = _NoData(int(options["steps_per_epoch"]), setting.device)

    def place(_: nn.Module) -> dict[str, float]:
        return {"objective": model.value().item(), **dict(zip("xy", model.point.tolist(), strict=True))}

    return Problem(model, lambda residuals, target: residuals.square().sum(), stream, place, SquaredError())


@final
class _NoData(Batches):
    """A stream of empty batches."""

    def __init__(self, steps_per_epoch: int, device: torch.device) -> None:
        self.steps_per_epoch = steps_per_epoch
        self._nothing = torch.zeros(1, 1, dtype=torch.float64, device=device)

    def next(self) -> tuple[Tensor, Tensor]:
        return self._nothing, self._nothing

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
