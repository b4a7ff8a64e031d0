r"""Networks for problems that are formulas: the Rosenbrock function, and a badly conditioned linear regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn


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
class LinearPair(nn.Module):
    r"""The network :math:`f(x) = W_2 W_1 x` without biases."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden, bias=False)
        self.second = nn.Linear(hidden, outputs, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[batch, inputs]`` to ``[batch, outputs]``."""
        return self.second(self.first(inputs))
