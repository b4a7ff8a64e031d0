"""Optimizers from torch: forward, backward, clip, step, schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apo_experiments.method import Method, Stepper
from apo_experiments.methods.hyper import COMMON
from apo_experiments.methods.muon_and_adamw import MuonAndAdamW
from apo_experiments.methods.passes import TrainingPass, training_pass
from apo_experiments.methods.schedules import build_scheduler
from apo_experiments.problem import Budget, Problem


class Driver:
    """How an optimizer of torch is used and saved; subclasses say what is different for others."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def before_pass(self, step: int) -> None:
        """Called before the forward pass of a step."""

    def run(self, usual: TrainingPass, inputs: Any, target: Any) -> Tensor:
        """Compute the gradients of a step and return the detached loss, by the usual pass or another."""
        return usual(inputs, target)

    def after_step(self, step: int) -> None:
        """Called after the optimizer's step."""

    def rate(self) -> float:
        """Return the current rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state as plain data."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load it."""
        self.optimizer.load_state_dict(dict(state))


@final
class PlainStepper(Stepper):
    """Trains with one optimizer."""

    def __init__(self, problem: Problem, driver: Driver, hyper: Mapping[str, Any], budget: Budget) -> None:
        self.driver = driver
        self._parameters, self._clip = problem.parameters, hyper["clip_grad_norm"]
        self._pass = training_pass(problem, hyper)
        self._scheduler = build_scheduler(driver.optimizer, hyper, budget)
        self._steps = 0

    def step(self, inputs: Any, target: Any) -> Tensor:
        """Forward, backward, clip, step, schedule."""
        self.driver.before_pass(self._steps)
        loss = self.driver.run(self._pass, inputs, target)
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self.driver.optimizer.step()
        self.driver.after_step(self._steps)
        if self._scheduler is not None:
            self._scheduler.step()
        self._steps += 1
        return loss

    def rate(self) -> float:
        """Return the current rate."""
        return self.driver.rate()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer and the schedule."""
        schedule = None if self._scheduler is None else self._scheduler.state_dict()
        return {"steps": self._steps, "optimizer": self.driver.state_dict(), "scheduler": schedule}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load them."""
        self._steps = int(state["steps"])
        self.driver.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])


_ADAM = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8}
_SGDM = {"lr": 0.1, "momentum": 0.9, "nesterov": False}

#: Optimizers of torch, the bases of APO's learned rates among them: what each is, what builds it, and its
#: hyperparameters beside the common ones.
_TORCH: dict[str, tuple[str, Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": ("stochastic gradient descent", torch.optim.SGD, {"lr": 0.1}),
    "sgdm": ("SGD with heavy-ball momentum", torch.optim.SGD, _SGDM),
    "rmsprop": ("RMSprop", torch.optim.RMSprop, {"lr": 3e-4, "alpha": 0.99, "eps": 1e-8}),
    "adam": ("Adam; weight decay is an L2 penalty", torch.optim.Adam, _ADAM),
    "adamw": ("Adam with decoupled weight decay", torch.optim.AdamW, _ADAM),
    "nadam": ("Adam with Nesterov momentum", torch.optim.NAdam, _ADAM),
    "nadamw": (
        "Adam with Nesterov momentum and decoupled weight decay",
        functools.partial(torch.optim.NAdam, decoupled_weight_decay=True),
        _ADAM | {"lr": 1e-3},
    ),
}


def torch_optimizer(name: str, parameters: list[nn.Parameter], hyper: Mapping[str, Any]) -> Optimizer:
    """Build an optimizer of torch from complete hyperparameters."""
    _, build, own = _TORCH[name]
    return build(parameters, **{key: hyper[key] for key in (*own, "weight_decay")})


def _method(name: str) -> Method:
    def build(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
        return PlainStepper(problem, Driver(torch_optimizer(name, problem.parameters, hyper)), hyper, budget)

    summary, _, own = _TORCH[name]
    return Method(name, summary, build, COMMON | own)


def _muon(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    own = (hyper[name] for name in ("lr", "momentum", "betas", "weight_decay", "adamw_lr"))
    return PlainStepper(problem, Driver(MuonAndAdamW(problem.model, *own)), hyper, budget)


#: Methods that need nothing but torch.
PLAIN: dict[str, Method] = {name: _method(name) for name in _TORCH} | {
    "muon": Method(
        "muon",
        "Muon for matrices, AdamW for everything else",
        _muon,
        COMMON | {"lr": 3e-3, "momentum": 0.95, "adamw_lr": 3e-3, "betas": (0.9, 0.95)},
    )
}
