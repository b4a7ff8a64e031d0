"""APO-Precond: a learned preconditioner with Kronecker, diagonal or full structure, or in an eigenbasis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import apo
from apo.rules import preconditioned
from apo_experiments.errors import choose
from apo_experiments.method import Method, Stepper
from apo_experiments.methods.hyper import COMMON
from apo_experiments.methods.tuned import OBJECTIVE, TunedStepper, described, meta_optimizer
from apo_experiments.problem import Budget, Problem

#: Hyperparameters of the step and of the rule; None leaves a value to the preset, and so to the library.
_DEFAULTS: dict[str, Any] = {
    "lr": 1.0,  # the multiple of the identity that the preconditioner starts from
    "preset": "default",
    "scale": 0.9,
    "momentum": 0.0,
    "clip": None,  # the largest norm of an update
    "decoupled_weight_decay": False,
    "warm_start": None,  # scale P to this multiple of the best step along the first gradient
    **described(preconditioned.META_OPTIMIZER),
    "meta_lr": None,
    # How the meta-rate falls, in the words of "schedule": Adam's steps stay as long as they were, and their
    # noise adds up in every element of the factors.
    "meta_schedule": "fixed",
    # The meta-rate of an n x n factor is times (64 / n) to this power where n is larger: the same step in every element
    # turns a wide matrix further than a narrow one.
    "meta_width": 0.0,
    "warmup": "none",
    "warmup_lr": 0.01,
    "warmup_momentum": 0.9,
    "warmup_steps": None,  # 3,000, but at most a tenth of the run
    "warmup_interval": None,  # steps between meta-steps during the warm-up
    "guard": None,
    "patience": 3,
}

#: How the library builds the rule and its meta-optimizer, by preset.
_PRESETS = {
    "default": (apo.Preconditioned, preconditioned.META_OPTIMIZER),
    "paper": (apo.Preconditioned.paper, preconditioned.PAPER_META_OPTIMIZER),
}

_STRUCTURES: dict[str, type[apo.Preconditioner]] = {
    "kronecker": apo.Kronecker,
    "eigenbasis": apo.Eigenbasis,
    "full": apo.Full,
    "diagonal": apo.Diagonal,
}
#: The widest factor that learns at the full meta-rate.
_WIDTH = 64

#: Hyperparameters that the preconditioners take; not all of them take each.
_OPTIONS = (
    *("lr", "scale", "momentum", "clip", "weight_decay", "decoupled_weight_decay"),
    *("conv", "max_dim", "matmul", "refresh_interval", "memory", "statistics"),
)

_WARMUPS = ("none", "sgdm", "adam")


def _warmup(parameters: list[nn.Parameter], hyper: Mapping[str, Any]) -> Optimizer | None:
    name = choose("warmup", hyper["warmup"], _WARMUPS)
    options = {"lr": hyper["warmup_lr"], "weight_decay": hyper["weight_decay"]}
    if name == "sgdm":
        return torch.optim.SGD(parameters, momentum=hyper["warmup_momentum"], **options)
    return torch.optim.Adam(parameters, **options) if name == "adam" else None


def _by_width(
    build: Callable[[list[Tensor]], Optimizer], optimizer: apo.Preconditioner, power: float
) -> Callable[[list[Tensor]], Optimizer]:
    """Return a factory of meta-optimizers that learn wide matrices more slowly; scales are no matrices."""
    widths = {
        factor: factor.shape[-1] / _WIDTH
        for layer in optimizer.layers
        for name, factor in layer.block.factors.items()
        if name not in ("S", "s") and factor.ndim > 1 and factor.shape[-1] > _WIDTH
    }

    def factory(phi: list[Tensor]) -> Optimizer:
        built = build([factor for factor in phi if factor not in widths] or [torch.zeros(0)])
        rate = built.param_groups[0]["lr"]
        for factor in phi:
            if factor in widths:
                built.add_param_group({"params": [factor], "lr": rate * widths[factor] ** -power})
        return built

    return factory if power else build


def _build(structure: str, problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    build_rule, usual = _PRESETS[choose("preset", hyper["preset"], _PRESETS)]
    if structure == "eigenbasis" and hyper["preset"] == "default":
        usual = preconditioned.EIGENBASIS_META_OPTIMIZER
    warmup = _warmup(problem.parameters, hyper)
    steps = min(3000, budget.steps // 10) if hyper["warmup_steps"] is None else hyper["warmup_steps"]
    options = {name: hyper[name] for name in _OPTIONS if name in hyper}
    optimizer = _STRUCTURES[structure](
        problem.model, warmup=warmup, warmup_steps=0 if warmup is None else steps, **options
    )
    factory = _by_width(meta_optimizer(usual, hyper), optimizer, hyper["meta_width"])
    rule = build_rule(
        optimizer,
        # With its own meta-optimizer an eigenbasis also goes to the turning point, with that of others it does not.
        meta_optimizer=None if factory is preconditioned.EIGENBASIS_META_OPTIMIZER else factory,
        **({} if hyper["guard"] is None else {"guard": hyper["guard"]}),
        patience=hyper["patience"],
        warmup_interval=hyper["warmup_interval"],
        warm_start=hyper["warm_start"],
    )
    return TunedStepper(problem, rule, hyper, budget)


def _method(name: str, structure: str, summary: str, own: dict[str, Any]) -> Method:
    return Method(name, summary, functools.partial(_build, structure), COMMON | OBJECTIVE | _DEFAULTS | own)


#: Methods whose preconditioner is learned.
PRECONDITIONED: dict[str, Method] = {
    method.name: method
    for method in (
        _method(
            "apo-precond",
            "kronecker",
            "APO-Precond: a learned EKFAC-shaped preconditioner",
            {"conv": "matrix", "max_dim": 8192, "matmul": "float32", "warmup": "sgdm"},
        ),
        _method(
            "apo-eigen",
            "eigenbasis",
            "APO-Eigen: learned rates and dampings in the eigenbasis of gradient statistics",
            {
                **{"lr": 0.1, "interval": None, "total_steps": "auto", "warm_start": preconditioned.EIGENBASIS_START},
                **{"conv": "auto", "max_dim": 1200, "matmul": "float32"},
                **{"refresh_interval": 200, "memory": 0.99, "statistics": "gradients"},
                **{"meta_optimizer": None, "meta_lr": None, "meta_beta2": None},
            },
        ),
        _method("apo-precond-full", "full", "a learned full preconditioning matrix, for few weights", {"lr": 1e-3}),
        _method("apo-precond-diagonal", "diagonal", "a learned diagonal preconditioner", {"lr": 0.1}),
    )
}
