"""Methods that are run without a search for a rate: APO as the library has it, and other packages' answers.

Each has the defaults that its authors document; what depends on the length of a run (warm-up) is a share of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from apo_experiments.method import Method, Stepper
from apo_experiments.methods.apo_rate import RATE, rate_rule
from apo_experiments.methods.hyper import COMMON
from apo_experiments.methods.muon_and_adamw import MuonAndAdamW
from apo_experiments.methods.packages import PACKAGES, EstimatingDriver, PackageDriver, package
from apo_experiments.methods.plain import BASES, PlainStepper, TorchDriver
from apo_experiments.methods.schedules import WARM_UP
from apo_experiments.methods.tuned import TunedStepper
from apo_experiments.problem import Budget, Problem

__all__ = ["UNTUNED"]

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}


def _trained(problem: Problem) -> list[nn.Parameter]:
    return [p for p in problem.model.parameters() if p.requires_grad]


def _learned(problem: Problem, optimizer: torch.optim.Optimizer, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    """Return APO around an optimizer."""
    return TunedStepper(problem, rate_rule(optimizer, hyper), hyper, budget)


def _apo(base: str) -> Method:
    """Return APO around a base optimizer with every setting left to the library, which is told the run's length."""
    name = f"{base}-apo"

    def build(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
        return _learned(problem, BASES[base](_trained(problem), hyper), hyper, budget)

    defaults = {**RATE[name].defaults, "interval": None, "total_steps": "auto"}
    return Method(f"{name}-untuned", f"{RATE[name].summary}, by the library's defaults", build, defaults)


def _muon_apo(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    optimizer = MuonAndAdamW(problem.model, hyper["lr"], hyper["momentum"], hyper["betas"], hyper["weight_decay"])
    return _learned(problem, optimizer, hyper, budget)


def _nadamw(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    own = {name: hyper[name] for name in ("lr", "betas", "eps", "weight_decay")}
    optimizer = torch.optim.NAdam(_trained(problem), **own, decoupled_weight_decay=True)
    return PlainStepper(problem, [TorchDriver(optimizer)], hyper, budget)


def _d_adaptation(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    optimizer = package().DAdaptAdam(
        _trained(problem),
        lr=hyper["lr"],
        betas=hyper["betas"],
        d0=hyper["d0"],
        weight_decay=hyper["weight_decay"],
        weight_decouple=True,
    )
    return PlainStepper(problem, [EstimatingDriver(optimizer)], hyper, budget)


def _adamg(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    optimizer = package().AdamG(_trained(problem), lr=hyper["lr"], weight_decay=hyper["weight_decay"])
    return PlainStepper(problem, [PackageDriver(optimizer)], hyper, budget)


def _warm(name: str) -> Method:
    """Return a Schedule-Free method that warms up for a share of the run, as its authors advise."""
    method = PACKAGES[name]
    defaults = {key: value for key, value in method.defaults.items() if key != "warmup_steps"}

    def build(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
        return method.build(problem, {**hyper, "warmup_steps": round(WARM_UP * budget.steps)}, budget)

    return replace(
        method, name=f"{name}-warm", summary=f"{method.summary} with a warm-up", build=build, defaults=defaults
    )


_METHODS = (
    _apo("sgdm"),
    _apo("adamw"),
    Method(
        "muon-apo-untuned",
        "Muon for matrices and AdamW for the rest, with one rate that APO learns",
        _muon_apo,
        {**RATE["adamw-apo"].defaults, "momentum": 0.95, "interval": None, "total_steps": "auto"},
    ),
    Method("nadamw", "Adam with Nesterov momentum and decoupled weight decay", _nadamw, COMMON | _ADAM),
    Method(
        "d-adaptation",
        "Adam whose rate D-Adaptation estimates",
        _d_adaptation,
        COMMON | {"lr": 1.0, "betas": (0.9, 0.999), "d0": 1e-6},
    ),
    Method("adamg", "AdamG: Adam scaled by the size of gradients", _adamg, COMMON | {"lr": 1.0}),
    _warm("schedule-free-sgd"),
    _warm("schedule-free-adamw"),
)

#: Methods for :mod:`apo_experiments.recipes.no_tuning`.
UNTUNED: dict[str, Method] = {method.name: method for method in _METHODS}
