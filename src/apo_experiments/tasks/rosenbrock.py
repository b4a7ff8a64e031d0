"""The Rosenbrock function as a training problem without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from apo.discrepancy import SquaredError
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
class Rosenbrock(nn.Module):
    r"""Two weights whose residuals make the Rosenbrock function :math:`f(x, y) = (1 - x)^2 + 100\,(y - x^2)^2`.

    It is a sum of two squares, so the network returns the residuals :math:`r = (1 - x,\ 10\,(y - x^2))` and the loss is
    :math:`\|r\|^2`. A Gauss-Newton step on it needs no second derivatives, and a function-space term has outputs to
    compare.
    """

    def __init__(self, start: Sequence[float] = (1.0, -1.5), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if len(start) != 2:
            raise ValueError(f"start must be the two numbers x and y, got {list(start)}")
        self.point = nn.Parameter(torch.tensor(list(start), dtype=dtype))

    def forward(self, inputs: Tensor | None = None) -> Tensor:
        """Return the residuals ``[1, 2]``; the inputs, empty batches, are ignored."""
        x, y = self.point
        return torch.stack([1 - x, 10 * (y - x**2)]).unsqueeze(0)

    def value(self) -> Tensor:
        """Return f(x, y)."""
        return self.forward().square().sum()


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
