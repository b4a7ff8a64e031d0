"""Who is measured: the bare optimizer, and apo on top of it. ``rivals`` has other ways to the same meta-gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apo

LEARNING_RATE = 0.01
MOMENTUM = 0.9


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Return the optimizer that all learning-rate contenders share."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


class Contender(ABC):
    """One way to train a network.

    Args:
        model: The network, its own.
        interval: Steps between meta-steps.
    """

    def __init__(self, model: nn.Module, interval: int) -> None:
        self.model = model
        self.interval = interval

    @abstractmethod
    def step(self, inputs: Tensor, target: Tensor) -> None:
        """Take one training step."""


class Bare(Contender):
    """SGD with momentum: what all others are compared with."""

    def __init__(self, model: nn.Module, interval: int = 1) -> None:
        super().__init__(model, interval)
        self.optimizer = sgd(model)

    def step(self, inputs: Tensor, target: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(inputs), target).backward()
        self.optimizer.step()


class LearnedRate(Contender):
    """The learning-rate rule through the explicit door, ``tuner.step(inputs, target)``.

    Args:
        model: The network.
        interval: Steps between meta-steps.
        cuda_graph: See :class:`apo.Tuner`.
    """

    def __init__(self, model: nn.Module, interval: int, cuda_graph: bool = False) -> None:
        super().__init__(model, interval)
        self.tuner = apo.APO(sgd(model), model, criterion=F.cross_entropy, interval=interval, cuda_graph=cuda_graph)

    def step(self, inputs: Tensor, target: Tensor) -> None:
        self.tuner.step(inputs, target)


class AttachedRate(Contender):
    """The learning-rate rule through the one-line door: the loop of :class:`Bare`, watched by hooks."""

    def __init__(self, model: nn.Module, interval: int) -> None:
        super().__init__(model, interval)
        self.optimizer, self.criterion = sgd(model), nn.CrossEntropyLoss()
        self.tuner = apo.attach(self.optimizer, model, self.criterion, interval=interval)

    def step(self, inputs: Tensor, target: Tensor) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.model(inputs), target).backward()
        self.optimizer.step()


class PreconditionedRule(Contender):
    """A preconditioner; unlike the others it replaces the optimizer, so every step costs more.

    Args:
        model: The network.
        interval: Steps between meta-steps.
        structure: The preconditioner's class.
        cuda_graph: See :class:`apo.Tuner`.
        options: Options of the preconditioner.
    """

    def __init__(
        self,
        model: nn.Module,
        interval: int,
        structure: type[apo.Preconditioner] = apo.Kronecker,
        cuda_graph: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, interval)
        optimizer = structure(model, lr=LEARNING_RATE, **options)
        self.tuner = apo.APO(optimizer, model, criterion=F.cross_entropy, interval=interval, cuda_graph=cuda_graph)

    def step(self, inputs: Tensor, target: Tensor) -> None:
        self.tuner.step(inputs, target)
