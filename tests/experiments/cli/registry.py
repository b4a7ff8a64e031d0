"""Recipes as small as can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apo_experiments.data import locate
from apo_experiments.method import Method, Stepper
from apo_experiments.problem import Batches, Budget, Problem
from apo_experiments.recipe import Entry, Recipe, Scale, Setting


class Noise(Batches):
    """Noisy targets around zero."""

    steps_per_epoch = 3

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        return torch.ones(4, 1), 0.1 * torch.randn(4, 1, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class Descent(Stepper):
    def __init__(self, problem: Problem, hyper: Mapping[str, Any]) -> None:
        self.problem, self.lr = problem, hyper["lr"]

    def step(self, inputs: Any, target: Any) -> Tensor:
        weights = list(self.problem.model.parameters())
        loss = self.problem.loss(self.problem.model(inputs), target)
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data.sub_(gradient, alpha=self.lr)
        return loss.detach()

    def rate(self) -> float:
        return self.lr

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def task(options: Mapping[str, Any], setting: Setting) -> Problem:
    if options["data"] == "official":
        locate.require("protein", setting.data_dir)
    if options["fail"]:
        raise RuntimeError("the task is broken")
    model = nn.Linear(1, 1)
    return Problem(model, nn.functional.mse_loss, Noise(setting.seed), lambda m: {"test_loss": float(m.bias.abs())})


def build(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    return Descent(problem, hyper)


METHODS = {name: Method(name, "descent", build, {"lr": 0.1}) for name in ("sgd", "sgd-apo")}


def recipe(name: str, **changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "name": name,
        "title": f"What {name} shows",
        "paper": "Table 7",
        "task": task,
        "defaults": {"data": "generated", "fail": False, "start": None},
        "data": ("protein",),
        "scales": {
            "smoke": Scale(2, 1, 0.05),
            "cpu": Scale(3, 2, 2, {"data": "official"}),
            "paper": Scale(4, 2, 600, {"data": "official"}),
        },
        "entries": (
            Entry("SGD", "sgd", {"lr": 0.2}, {"lr": [0.1, 0.2]}, paper=0.5),
            Entry("SGD-APO", "sgd-apo", paper=0.25),
        ),
        "metric": "test_loss",
        "goal": "min",
        "notes": "The paper claims that <APO> & co. are lower.",
    }
    return Recipe(**(fields | changes))


RECIPES = {made.name: made for made in (recipe("little-mlp"), recipe("other-task", figure="bars"))}
