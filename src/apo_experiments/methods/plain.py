"""Optimizers from torch: forward, backward, clip, step, schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apo_experiments.errors import UserError
from apo_experiments.method import Method, Stepper
from apo_experiments.methods.hyper import COMMON
from apo_experiments.methods.passes import training_pass
from apo_experiments.methods.schedules import build_scheduler
from apo_experiments.problem import Budget, Problem


class Driver(ABC):
    """How one optimizer is used and saved."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def before_pass(self, step: int) -> None:
        """Called before the forward pass of a step."""

    def after_step(self, step: int) -> None:
        """Called after the optimizer's step."""

    def rate(self) -> float:
        """Return the current rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state as plain data."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load it."""


@final
class TorchDriver(Driver):
    """An optimizer of torch."""

    def state_dict(self) -> dict[str, Any]:
        """Return torch's own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load it."""
        self.optimizer.load_state_dict(dict(state))


@final
class PlainStepper(Stepper):
    """Trains with one or several optimizers, each for its own parameters."""

    def __init__(self, problem: Problem, drivers: Sequence[Driver], hyper: Mapping[str, Any], budget: Budget) -> None:
        self._parameters = [p for p in problem.model.parameters() if p.requires_grad]
        self._drivers = list(drivers)
        self._pass = training_pass(problem, hyper)
        self._clip = hyper["clip_grad_norm"]
        schedulers = (build_scheduler(driver.optimizer, hyper, budget) for driver in drivers)
        self._schedulers = [scheduler for scheduler in schedulers if scheduler is not None]
        self._steps = 0

    def step(self, inputs: Any, target: Any) -> Tensor:
        """Forward, backward, clip, step, schedule."""
        for driver in self._drivers:
            driver.before_pass(self._steps)
        loss = self._pass(inputs, target)
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        for driver in self._drivers:
            driver.optimizer.step()
            driver.after_step(self._steps)
        for scheduler in self._schedulers:
            scheduler.step()
        self._steps += 1
        return loss

    def rate(self) -> float:
        """Return the current rate."""
        return self._drivers[0].rate()

    def state_dict(self) -> dict[str, Any]:
        """Return optimizers and schedules."""
        return {
            "steps": self._steps,
            "optimizers": [driver.state_dict() for driver in self._drivers],
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load them."""
        self._steps = int(state["steps"])
        for driver, saved in zip(self._drivers, state["optimizers"], strict=True):
            driver.load_state_dict(saved)
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)


#: Builds a torch optimizer from parameters and hyperparameters; the bases of APO's learned rates, too.
BASES: dict[str, Callable[[list[nn.Parameter], Mapping[str, Any]], Optimizer]] = {
    "sgd": lambda params, h: torch.optim.SGD(params, lr=h["lr"], weight_decay=h["weight_decay"]),
    "sgdm": lambda params, h: torch.optim.SGD(
        params, lr=h["lr"], momentum=h["momentum"], nesterov=h["nesterov"], weight_decay=h["weight_decay"]
    ),
    "rmsprop": lambda params, h: torch.optim.RMSprop(
        params, lr=h["lr"], alpha=h["alpha"], eps=h["eps"], weight_decay=h["weight_decay"]
    ),
    "adam": lambda params, h: torch.optim.Adam(params, **_adam(h)),
    "adamw": lambda params, h: torch.optim.AdamW(params, **_adam(h)),
    "nadam": lambda params, h: torch.optim.NAdam(params, **_adam(h)),
}

#: Hyperparameters of each base beside the common ones.
BASE_DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "sgdm": {"lr": 0.1, "momentum": 0.9, "nesterov": False},
    "rmsprop": {"lr": 3e-4, "alpha": 0.99, "eps": 1e-8},
    "adam": {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8},
    "adamw": {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8},
    "nadam": {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8},
}

_SUMMARIES = {
    "sgd": "stochastic gradient descent",
    "sgdm": "SGD with heavy-ball momentum",
    "rmsprop": "RMSprop",
    "adam": "Adam; weight decay is an L2 penalty",
    "adamw": "Adam with decoupled weight decay",
    "nadam": "Adam with Nesterov momentum",
}


def _adam(hyper: Mapping[str, Any]) -> dict[str, Any]:
    return {name: hyper[name] for name in ("lr", "betas", "eps", "weight_decay")}


def _method(name: str) -> Method:
    def build(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
        parameters = [p for p in problem.model.parameters() if p.requires_grad]
        return PlainStepper(problem, [TorchDriver(BASES[name](parameters, hyper))], hyper, budget)

    return Method(name, _SUMMARIES[name], build, COMMON | BASE_DEFAULTS[name])


def _build_muon(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise UserError(f"method 'muon' needs torch 2.9 or newer, this is {torch.__version__}: install a newer torch.")
    trained = [p for p in problem.model.parameters() if p.requires_grad]
    lookups = {p for m in problem.model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    matrices = [p for p in trained if p.ndim == 2 and p not in lookups]
    rest = [p for p in trained if p.ndim != 2 or p in lookups]
    decay = hyper["weight_decay"]
    drivers = []
    if matrices:
        options = {"momentum": hyper["momentum"], "weight_decay": decay, "adjust_lr_fn": "match_rms_adamw"}
        drivers.append(TorchDriver(muon(matrices, lr=hyper["lr"], **options)))
    if rest:
        drivers.append(
            TorchDriver(torch.optim.AdamW(rest, lr=hyper["adamw_lr"], betas=hyper["betas"], weight_decay=decay))
        )
    return PlainStepper(problem, drivers, hyper, budget)


#: Methods that need nothing but torch.
PLAIN: dict[str, Method] = {name: _method(name) for name in BASES} | {
    "muon": Method(
        "muon",
        "Muon for matrices, AdamW for everything else",
        _build_muon,
        COMMON | {"lr": 3e-3, "momentum": 0.95, "adamw_lr": 3e-3, "betas": (0.9, 0.95)},
    )
}
