"""Other preconditioned optimizers, all at APO's interval: how often they look at curvature, invert or decompose."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apo_experiments.baselines import KFAC

from .contenders import LEARNING_RATE, Contender

HAS_PYTORCH_OPTIMIZER = importlib.util.find_spec("pytorch_optimizer") is not None


class Kfac(Contender):
    """KFAC with statistics and inverses at every ``interval`` steps."""

    def __init__(self, model: nn.Module, interval: int) -> None:
        super().__init__(model, interval)
        self.optimizer = KFAC(
            model, lr=LEARNING_RATE, damping=0.1, statistics_interval=interval, inverse_interval=interval
        )

    def step(self, inputs: Tensor, target: Tensor) -> None:
        self.optimizer.zero_grad()
        output = self.model(inputs)
        if self.optimizer.wants_statistics:
            self.optimizer.observe(output, "categorical")
        F.cross_entropy(output, target).backward()
        self.optimizer.step()


class Packaged(Contender):
    """An optimizer of the package pytorch-optimizer.

    Args:
        model: The network.
        interval: Steps between roots of matrices or decompositions.
        name: The optimizer's class.
        interval_argument: What the optimizer calls the interval.
        options: Its other arguments.
    """

    def __init__(self, model: nn.Module, interval: int, name: str, interval_argument: str, **options: Any) -> None:
        import pytorch_optimizer

        super().__init__(model, interval)
        build = getattr(pytorch_optimizer, name)
        self.optimizer: torch.optim.Optimizer = build(
            model.parameters(), lr=1e-3, **{interval_argument: interval}, **options
        )

    def step(self, inputs: Tensor, target: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(inputs), target).backward()
        self.optimizer.step()


Shampoo = partial(
    Packaged, name="ScalableShampoo", interval_argument="preconditioning_compute_steps", shape_interpretation=False
)
Soap = partial(Packaged, name="SOAP", interval_argument="precondition_frequency")
