"""What every method must do: a case of it is a name and, where the defaults are too slow for 60 steps, a rate."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import apo_experiments.methods as methods
from apo_experiments.method import Method, Stepper
from apo_experiments.methods.hyper import filled
from apo_experiments.problem import Batches, Budget, Problem

__all__ = ["STEPS", "Cycle", "build", "classification", "regression", "saved_and_loaded", "take_steps", "tiny_loss"]

STEPS = 60


class Cycle(Batches):
    """A few batches, again and again."""

    def __init__(self, batches: list[tuple[Any, Any]]) -> None:
        self._batches = batches
        self._position = 0
        self.steps_per_epoch = len(batches)

    def next(self) -> tuple[Any, Any]:
        self._position += 1
        return self._batches[(self._position - 1) % len(self._batches)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position = int(state["position"])


def classification(seed: int = 0, dtype: torch.dtype = torch.float32) -> Problem:
    """A small convolutional network with BatchNorm and dropout on images that a linear rule can tell apart."""
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(3, 1, 8, 8, generator=generator)
    labels = [torch.randint(3, (24,), generator=generator) for _ in range(4)]
    batches = [((prototypes[y] + 0.5 * torch.randn(24, 1, 8, 8, generator=generator)).to(dtype), y) for y in labels]
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(36, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    ).to(dtype)
    return Problem(model, nn.functional.cross_entropy, Cycle(batches), lambda model: {})


def regression(seed: int = 0) -> Problem:
    """A small network that fits a linear map in the squared error."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(5, 2, generator=generator)
    inputs = [torch.randn(16, 5, generator=generator) for _ in range(4)]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 2))
    return Problem(model, nn.functional.mse_loss, Cycle([(x, x @ matrix) for x in inputs]), lambda model: {})


def complete(method: Method, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return all hyperparameters of a method, some of them replaced, none of them unknown to it."""
    assert overrides.keys() <= method.defaults.keys(), sorted(overrides.keys() - method.defaults.keys())
    return filled(method.defaults, overrides)


def build(name: str, problem: Problem, overrides: Mapping[str, Any]) -> Stepper:
    method = methods.METHODS[name]
    return method.build(problem, complete(method, overrides), Budget(STEPS, problem.batches.steps_per_epoch))


def take_steps(stepper: Stepper, problem: Problem, count: int) -> list[Tensor]:
    return [stepper.step(*problem.batches.next()) for _ in range(count)]


def tiny_loss(problem: Problem) -> float:
    """The loss over all batches in evaluation mode, at the weights as they are."""
    batches, training = problem.batches, problem.model.training
    assert isinstance(batches, Cycle)
    problem.model.eval()
    with torch.no_grad():
        losses = [problem.loss(problem.model(x), y) for x, y in batches._batches]
    problem.model.train(training)
    return torch.stack(losses).float().mean().item()


def saved_and_loaded(stepper: Stepper, problem: Problem) -> dict[str, Any]:
    """A checkpoint as the training loop writes it, through a file."""
    file = io.BytesIO()
    state = {
        "model": problem.model.state_dict(),
        "batches": problem.batches.state_dict(),
        "stepper": stepper.state_dict(),
        "random": torch.get_rng_state(),
    }
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
