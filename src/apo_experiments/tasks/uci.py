"""Regression on tables of the UCI collection with a small network (section 5.2.1, appendix B.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from apo_experiments.data import tables
from apo_experiments.data.streams import TableBatches
from apo_experiments.errors import UserError
from apo_experiments.models.mlp import MLP
from apo_experiments.problem import Problem
from apo_experiments.recipe import Setting
from apo_experiments.tasks.evaluation import mean_over

__all__ = ["DEFAULTS", "table_of", "uci"]

#: Options: the table, where it comes from, units of each of the two hidden layers; the first so many ``rows``.
DEFAULTS: dict[str, Any] = {
    "table": "protein",
    "data": "official",
    "rows": None,
    "hidden": 100,
    "batch_size": 128,
}


def uci(options: Mapping[str, Any], setting: Setting) -> Problem:
    """Build the problem; the metric ``objective`` is the mean squared error over all rows.

    Args:
        options: See :data:`DEFAULTS`.
        setting: The seed decides the initial weights and the order of the rows.
    """
    table = table_of(options, setting)
    inputs, targets = table.inputs[: options["rows"]], table.targets[: options["rows"]]
    inputs, targets = inputs.to(setting.device), targets.to(setting.device)
    hidden = int(options["hidden"])
    model = MLP([inputs.shape[1], hidden, hidden, targets.shape[1]]).to(setting.device)
    stream = TableBatches(inputs, targets, options["batch_size"], setting.seed, setting.device)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"objective": mean_over(model, _error, inputs, targets)[0]}

    return Problem(model, F.mse_loss, stream, evaluate)


def _error(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target).reshape(1)


def table_of(options: Mapping[str, Any], setting: Setting) -> tables.Table:
    """Return the table that the options ask for."""
    if options["data"] == "official":
        return tables.load(options["table"], setting.data_dir)
    if options["data"] != "generated":
        raise UserError(f"data was {options['data']!r}: it must be official or generated.")
    return tables.generated(rows=options["rows"] or 256, targets=2 if options["table"] == "parkinsons" else 1)
