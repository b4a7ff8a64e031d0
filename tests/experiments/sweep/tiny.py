"""A recipe to sweep: gradient descent on a parabola, whose best rate is known.

From x = 1 on x^2 / 2, each step multiplies x by 1 - lr: lr = 1 solves it at once, lr > 2 diverges. The environment
makes runs slower (``TINY_PAUSE``, seconds a step) and notes in a file (``TINY_LOG``) which ones are trained.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apo_experiments.errors import UserError
from apo_experiments.method import Method, Stepper
from apo_experiments.problem import Batches, Budget, Problem
from apo_experiments.recipe import Entry, Recipe, Scale, Setting

RATES = (0.125, 0.25, 0.5, 1.0, 1.5, 3.0)
STEPS_PER_EPOCH = 4


class Parabola(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.x + 0 * inputs


class Nothing(Batches):
    steps_per_epoch = STEPS_PER_EPOCH

    def next(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(()), torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target) ** 2 / 2


def task(options: Mapping[str, Any], setting: Setting) -> Problem:
    if options["missing"]:
        raise UserError("the data are missing: fetch them.")

    def evaluate(model: nn.Module) -> dict[str, float]:
        final = float(loss(model(torch.zeros(())), torch.zeros(())))
        # The seed counts, so that a mean over seeds can be told from a single one.
        metrics = {"test_loss": final + 100 * setting.seed}
        return metrics | ({"valid_loss": final + 10 + 100 * setting.seed} if options["validation"] else {})

    return Problem(Parabola(), loss, Nothing(), evaluate)


class Descent(Stepper):
    def __init__(self, problem: Problem, hyper: Mapping[str, Any]) -> None:
        self.problem, self.hyper = problem, hyper
        _note(f"begin {hyper['lr']}")

    def step(self, inputs: Any, target: Any) -> Tensor:
        time.sleep(float(os.environ.get("TINY_PAUSE", 0)))
        if self.hyper["lr"] == self.hyper["crash_at"]:
            raise RuntimeError("out of luck")
        x = self.problem.model.x
        before = loss(x, target).detach()
        with torch.no_grad():
            x -= self.hyper["lr"] * x
            if abs(x) > 50:
                x.fill_(float("nan"))
        _note(f"step {self.hyper['lr']}")
        return before

    def rate(self) -> float:
        return self.hyper["lr"]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _note(line: str) -> None:
    if path := os.environ.get("TINY_LOG"):
        # One write to a file opened for appending: lines of several processes do not mix.
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{line}\n".encode())
        os.close(handle)


def build(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    return Descent(problem, hyper)


METHODS = {"descent": Method("descent", "", build, {"lr": 0.1, "crash_at": None})}


def recipe(**changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "name": "parabola",
        "title": "",
        "paper": "",
        "task": task,
        "defaults": {"validation": False, "missing": False},
        "data": (),
        "scales": {"smoke": Scale(2, 1, 0.1)},
        "entries": (
            Entry("Descent", "descent", grid={"lr": RATES}),
            Entry("Other", "descent", grid={"lr": RATES[:2]}, hyper={"crash_at": 7.0}),
            Entry("Fixed", "descent"),
        ),
        "metric": "test_loss",
        "goal": "min",
    }
    return Recipe(**(fields | changes))


RECIPES = {"parabola": recipe()}
