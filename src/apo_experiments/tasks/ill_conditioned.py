r"""Badly conditioned regression with a two-layer linear network (section 5.2.1; Rahimi and Recht, 2017).

Targets are :math:`y = A x` with standard normal x, the network is :math:`W_2 W_1 x` and the objective

.. math:: J(W_1, W_2) = E_x \|A x - W_2 W_1 x\|^2 = \|A - W_2 W_1\|_F^2 .

The singular values of A fall evenly on a log scale from 1 to 1 / condition number, between random orthogonal bases.
Neither they nor the sizes (six inputs, six hidden units, ten outputs) are the paper's, which gives none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from apo.discrepancy import SquaredError
from apo_experiments.data.streams import EpochBatches
from apo_experiments.problem import Problem
from apo_experiments.recipe import Setting

#: Options: the condition number of A, sizes, and how many new batches make an "epoch" (there is no end of data).
DEFAULTS: dict[str, Any] = {
    "condition_number": 1e10,
    "inputs": 6,
    "hidden": 6,
    "outputs": 10,
    "batch_size": 128,
    "steps_per_epoch": 100,
}


def ill_conditioned(options: Mapping[str, Any], setting: Setting) -> Problem:
    """Build the problem, in float64; the metric ``objective`` is J itself, not an estimate."""
    matrix = _matrix(options["outputs"], options["inputs"], options["condition_number"], setting.seed)
    matrix = matrix.to(setting.device)
    first = nn.Linear(options["inputs"], options["hidden"], bias=False)
    second = nn.Linear(options["hidden"], options["outputs"], bias=False)
    model = nn.Sequential(OrderedDict(first=first, second=second)).double().to(setting.device)
    stream = _NormalInputs(matrix, options["batch_size"], options["steps_per_epoch"], setting.seed)

    def evaluate(_: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            return {"objective": float((matrix - second.weight @ first.weight).square().sum())}

    return Problem(model, _squared_error, stream, evaluate, SquaredError())


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(1).mean()


def _matrix(outputs: int, inputs: int, condition_number: float, seed: int) -> Tensor:
    """Return A ``[outputs, inputs]``."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(outputs, inputs)
    left, right = (
        torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64)).Q
        for size in (outputs, inputs)
    )
    # Exponents, because with a condition number of 1e10 a subtraction would lose all digits.
    exponents = torch.linspace(0, 1, rank, dtype=torch.float64)
    return (left * condition_number**-exponents) @ right.T


@final
class _NormalInputs(EpochBatches):
    """An endless stream of standard normal inputs, with their targets."""

    def __init__(self, matrix: Tensor, batch_size: int, steps_per_epoch: int, seed: int) -> None:
        super().__init__(steps_per_epoch, seed, matrix.device)
        self._matrix, self._batch_size = matrix, batch_size
        self._inputs = matrix.new_empty(0)

    def start_epoch(self, generator: torch.Generator) -> None:
        shape = (self.steps_per_epoch, self._batch_size, self._matrix.shape[1])
        self._inputs = torch.randn(shape, generator=generator, dtype=torch.float64, device=self._matrix.device)

    def batch(self, position: int) -> tuple[Tensor, Tensor]:
        inputs = self._inputs[position]
        return inputs, inputs @ self._matrix.T
