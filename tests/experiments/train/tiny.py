"""A recipe, a task and four methods that are as small as can be, and everything that could go wrong in a loop.

The network has dropout and BatchNorm, and evaluation misbehaves on purpose: it switches modes, moves the running
statistics, fills gradients and draws random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apo
from apo_experiments.method import Method, Stepper
from apo_experiments.problem import Batches, Budget, Problem
from apo_experiments.recipe import Entry, Recipe, Scale, Setting
from apo_experiments.runs import RunConfig

FEATURES, CLASSES = 6, 3
STEPS_PER_EPOCH = 5


class ShuffledRows(Batches):
    """Random batches of 16 rows in an order that depends on the seed."""

    steps_per_epoch = STEPS_PER_EPOCH

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def next(self) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(16, FEATURES, generator=self.generator)
        target = (inputs[:, :CLASSES] + 0.3 * inputs[:, CLASSES:]).argmax(dim=1)
        return inputs.to(self.device), target.to(self.device)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"].cpu())


def evaluate(model: nn.Module) -> dict[str, float]:
    """Judge the network as rudely as possible."""
    model.train()
    device = next(model.parameters()).device
    inputs = torch.randn(32, FEATURES, generator=torch.Generator().manual_seed(99)).to(device)
    with torch.enable_grad():
        model(inputs + 5 + torch.rand(1, device=device)).sum().backward()
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(inputs), inputs[:, :CLASSES].argmax(dim=1))
    return {"test_loss": float(loss)}


def task(options: Mapping[str, Any], setting: Setting) -> Problem:
    model = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES)
    ).to(setting.device)
    judge = evaluate if options.get("evaluate", True) else (lambda model: {"test_loss": 0.0})
    return Problem(model, F.cross_entropy, ShuffledRows(setting.seed, setting.device), judge)


class PlainStepper(Stepper):
    def __init__(self, problem: Problem, optimizer: torch.optim.Optimizer) -> None:
        self.problem, self.optimizer = problem, optimizer

    def step(self, inputs: Any, target: Any) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.problem.loss(self.problem.model(inputs), target)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(dict(state))


class TunedStepper(Stepper):
    def __init__(self, problem: Problem, rule: Any) -> None:
        self.tuner = apo.APO(rule, problem.model, criterion=problem.loss, interval=3)

    def step(self, inputs: Any, target: Any) -> Tensor:
        return self.tuner.step(inputs, target)

    def rate(self) -> float:
        return self.tuner.optimizer.param_groups[0]["lr"]

    def state_dict(self) -> dict[str, Any]:
        return self.tuner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tuner.load_state_dict(state)

    def telemetry(self) -> dict[str, float]:
        return {"fsd": self.tuner.history[-1].fsd}


def plain(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[..., Stepper]:
    return lambda problem, hyper, budget: PlainStepper(
        problem, make(problem.model.parameters(), lr=hyper["lr"], **options)
    )


def _apo_rate(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    return TunedStepper(problem, torch.optim.SGD(problem.model.parameters(), lr=hyper["lr"], momentum=0.9))


def _apo_precond(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    warmup = torch.optim.SGD(problem.model.parameters(), lr=0.01, momentum=0.9)
    optimizer = apo.Kronecker(problem.model, lr=hyper["lr"], momentum=0.5, warmup=warmup, warmup_steps=4)
    return TunedStepper(problem, apo.Preconditioned(optimizer, warmup_interval=1))


METHODS = {
    "sgdm": Method("sgdm", "", plain(torch.optim.SGD, momentum=0.9), {"lr": 0.05}),
    "adam": Method("adam", "", plain(torch.optim.Adam), {"lr": 0.01}),
    "apo-rate": Method("apo-rate", "", _apo_rate, {"lr": 0.05}),
    "apo-precond": Method("apo-precond", "", _apo_precond, {"lr": 0.05}),
}
NAMES = tuple(METHODS)


def recipe(name: str = "tiny", **changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "name": name,
        "title": "",
        "paper": "",
        "task": task,
        "defaults": {"evaluate": True},
        "data": (),
        "scales": {"smoke": Scale(4, 1, 0.1)},
        "entries": tuple(Entry(method, method) for method in METHODS),
        "metric": "test_loss",
        "goal": "min",
    }
    return Recipe(**(fields | changes))


RECIPES = {"tiny": recipe()}


def config(method: str = "sgdm", **changes: Any) -> RunConfig:
    fields: dict[str, Any] = {
        "recipe": "tiny",
        "label": method,
        "method": method,
        "scale": "smoke",
        "seed": 3,
        "epochs": 4,
        "hyper": dict(METHODS[method].defaults) if method in METHODS else {},
        "options": {"evaluate": True},
    }
    return RunConfig(**(fields | changes))
