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
from apo_experiments.methods.passes import training_pass
from apo_experiments.methods.schedules import build_scheduler
from apo_experiments.problem import Budget, Problem


class PlainStepper(Stepper):
    """Trains with one optimizer of torch; subclasses say what is different for others.

    Attributes:
        steps: Steps taken.
    """

    def __init__(self, problem: Problem, optimizer: Optimizer, hyper: Mapping[str, Any], budget: Budget) -> None:
        self.problem, self.optimizer, self.hyper, self.budget = problem, optimizer, hyper, budget
        self.steps = 0
        self._pass = training_pass(problem, hyper)
        self._scheduler = build_scheduler(optimizer, hyper, budget)

    def before_pass(self) -> None:
        """Called before the forward pass of a step."""

    def compute(self, inputs: Any, target: Any) -> Tensor:
        """Compute the gradients of a step and return the detached loss."""
        return self._pass(inputs, target)

    def after_step(self) -> None:
        """Called after the optimizer's step, the last of :attr:`steps`."""

    def step(self, inputs: Any, target: Any) -> Tensor:
        """Forward, backward, clip, step, schedule."""
        self.before_pass()
        loss = self.compute(inputs, target)
        if self.hyper["clip_grad_norm"] is not None:
            nn.utils.clip_grad_norm_(self.problem.parameters, self.hyper["clip_grad_norm"])
        self.optimizer.step()
        self.steps += 1
        self.after_step()
        if self._scheduler is not None:
            self._scheduler.step()
        return loss

    def rate(self) -> float:
        """Return the current rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state as plain data."""
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Load it."""
        self.optimizer.load_state_dict(dict(state))

    @final
    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer and the schedule."""
        schedule = None if self._scheduler is None else self._scheduler.state_dict()
        return {"steps": self.steps, "optimizer": self.optimizer_state(), "scheduler": schedule}

    @final
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load them."""
        self.steps = int(state["steps"])
        self.load_optimizer_state(state["optimizer"])
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
        return PlainStepper(problem, torch_optimizer(name, problem.parameters, hyper), hyper, budget)

    summary, _, own = _TORCH[name]
    return Method(name, summary, build, COMMON | own)


def _muon(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    own = (hyper[name] for name in ("lr", "momentum", "betas", "weight_decay", "adamw_lr"))
    return PlainStepper(problem, MuonAndAdamW(problem.model, *own), hyper, budget)


#: Methods that need nothing but torch.
PLAIN: dict[str, Method] = {name: _method(name) for name in _TORCH} | {
    "muon": Method(
        "muon",
        "Muon for matrices, AdamW for everything else",
        _muon,
        COMMON | {"lr": 3e-3, "momentum": 0.95, "adamw_lr": 3e-3, "betas": (0.9, 0.95)},
    )
}
