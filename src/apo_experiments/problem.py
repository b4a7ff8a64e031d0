"""Problems: a network, a loss, a stream of batches and an evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import apo


class Batches(ABC):
    """An endless stream of training batches on the training device.

    The order of the data depends only on the seed, and :meth:`state_dict` saves the position.
    """

    #: How many batches make an epoch.
    steps_per_epoch: int

    @abstractmethod
    def next(self) -> tuple[Any, Any]:
        """Return the next batch: the network's inputs (tensor, tuple or mapping) and the target of the loss."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return plain data that ``torch.load(weights_only=True)`` accepts."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the batch that would have been next."""


@dataclass(frozen=True)
class Problem:
    """One training problem on one device, with one seed.

    Attributes:
        model: The network, initialised.
        loss: ``loss(output, target)``, a scalar.
        batches: The training data.
        evaluate: Returns the metrics of the network without changing its state, its modes or random number generators.
        discrepancy: The divergence for APO's function-space term.
        trained_as: What training passes call instead of the model: the same weights, computed faster.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    batches: Batches
    evaluate: Callable[[nn.Module], dict[str, float]]
    discrepancy: apo.Discrepancy | str = "auto"
    trained_as: nn.Module | None = None

    @property
    def trained(self) -> nn.Module:
        """What training passes call."""
        return self.model if self.trained_as is None else self.trained_as

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weights that are trained."""
        return [p for p in self.model.parameters() if p.requires_grad]


@dataclass(frozen=True)
class Budget:
    """How long a run is, for schedules and for progress.

    Attributes:
        steps: Training steps in all.
        steps_per_epoch: Training steps in an epoch; evaluation happens at the end of each.
    """

    steps: int
    steps_per_epoch: int
