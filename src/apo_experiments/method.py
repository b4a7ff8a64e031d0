"""Methods: each builds a stepper for a problem."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from apo_experiments.problem import Budget, Problem


class Stepper(ABC):
    """One optimizer at work on one problem."""

    @abstractmethod
    def step(self, inputs: Any, target: Any) -> Tensor:
        """Take one training step, including the schedule, and return the detached loss on the device."""

    @abstractmethod
    def rate(self) -> float:
        """Return the current learning rate (of the first param group), or what a preconditioner has in its place."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact resume needs besides the network's weights, as plain data."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume exactly where :meth:`state_dict` was called, after the network's weights have been loaded."""

    def telemetry(self) -> dict[str, float]:
        """Return more values for the record, such as the terms of Q at the last meta-step."""
        return {}


@dataclass(frozen=True)
class Method:
    """A way to train, with its hyperparameters and their defaults.

    Attributes:
        name: What the command line calls it.
        summary: One line on what it is.
        build: Makes a stepper from the problem, a complete set of hyperparameters and the budget.
        defaults: All hyperparameters and their default values; ``--set`` accepts these keys and no others.
        needs: The module that it needs beside torch, and the name of its package for pip.
    """

    name: str
    summary: str
    build: Callable[[Problem, Mapping[str, Any], Budget], Stepper]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, str] | None = None

    @property
    def missing(self) -> str | None:
        """The package that it needs and that is not installed."""
        return self.needs[1] if self.needs and importlib.util.find_spec(self.needs[0]) is None else None
