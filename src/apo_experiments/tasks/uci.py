"""Regression on tables of the UCI collection with a small network (section 5.2.1, appendix B.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from apo_experiments.data import tables
from apo_experiments.data.streams import TableBatches
from apo_experiments.errors import choose
from apo_experiments.models.mlp import MLP
from apo_experiments.problem import Problem
from apo_experiments.recipe import Setting
from apo_experiments.tasks.evaluation import Part, judged

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
    inputs, targets = table_of(options, setting)
    judge = judged({"": (inputs, targets)}, {"objective": F.mse_loss})
    return perceptron((inputs, targets), targets.shape[1], F.mse_loss, judge, options, setting)


def perceptron(
    rows: Part,
    outputs: int,
    loss: Callable[[Any, Any], Tensor],
    evaluate: Callable[[nn.Module], dict[str, float]],
    options: Mapping[str, Any],
    setting: Setting,
) -> Problem:
    """Return the problem of a network with two hidden layers on rows of inputs and targets."""
    hidden = int(options["hidden"])
    model = MLP([rows[0].shape[1], hidden, hidden, outputs]).to(setting.device)
    stream = TableBatches(*rows, options["batch_size"], setting.seed, setting.device)
    return Problem(model, loss, stream, evaluate)


def table_of(options: Mapping[str, Any], setting: Setting) -> Part:
    """Return the inputs and targets that the options ask for."""
    if choose("data", options["data"], ("official", "generated")) == "official":
        table = tables.load(options["table"], setting.data_dir)
    else:
        table = tables.generated(rows=options["rows"] or 256, targets=2 if options["table"] == "parkinsons" else 1)
    inputs, targets = (part[: options["rows"]].to(setting.device) for part in (table.inputs, table.targets))
    return inputs, targets
