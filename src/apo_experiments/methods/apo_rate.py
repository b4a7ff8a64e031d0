"""APO on the learning rate of each base optimizer, and on SGD's rate and momentum together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import apo
from apo.rules import learning_rate, rate_and_momentum
from apo_experiments.errors import choose
from apo_experiments.method import Method, Stepper
from apo_experiments.methods.hyper import COMMON
from apo_experiments.methods.muon_and_adamw import MuonAndAdamW
from apo_experiments.methods.plain import PLAIN, torch_optimizer
from apo_experiments.methods.tuned import OBJECTIVE, TunedStepper, described, meta_optimizer
from apo_experiments.problem import Budget, Problem

#: Hyperparameters of the learned rate; None leaves a value to the preset, and so to the library.
_RULE: dict[str, Any] = {
    "preset": "default",
    "look_ahead": None,
    "over_relaxation": None,
    "warm_start": None,
    "max_change": None,  # 0 for no limit
    "per_group": False,
    "meta_optimizer": None,
    "meta_lr": None,
    "meta_beta2": None,
}

#: How the library builds the rule and its meta-optimizer, by preset.
_PRESETS = {
    "default": (apo.LearningRate, learning_rate.META_OPTIMIZER),
    "paper": (apo.LearningRate.paper, learning_rate.PAPER_META_OPTIMIZER),
}


def rate_rule(optimizer: torch.optim.Optimizer, hyper: Mapping[str, Any]) -> apo.LearningRate:
    """Build the rule that learns the rate of an optimizer.

    Args:
        optimizer: The base optimizer.
        hyper: With ``preset`` (``"default"``: the library's, or ``"paper"``), and what overrules it where it is not
            None: ``look_ahead``, ``over_relaxation``, ``warm_start``, ``max_change``, ``meta_optimizer``,
            ``meta_lr``, ``meta_beta2``.
    """
    build, usual = _PRESETS[choose("preset", hyper["preset"], _PRESETS)]
    given = ("look_ahead", "over_relaxation", "warm_start")
    options: dict[str, Any] = {name: hyper[name] for name in given if hyper[name] is not None}
    if hyper["max_change"] is not None:
        options["max_change"] = hyper["max_change"] or None
    if any(hyper[name] is not None for name in ("meta_optimizer", "meta_lr", "meta_beta2")):
        options["meta_optimizer"] = meta_optimizer(usual, hyper)  # else the library may step without one
    return build(optimizer, per_group=hyper["per_group"], **options)


def _method(base: str) -> Method:
    def build(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
        optimizer = torch_optimizer(base, problem.parameters, hyper)
        return TunedStepper(problem, rate_rule(optimizer, hyper), hyper, budget)

    summary = f"{base} whose learning rate APO learns"
    return Method(f"{base}-apo", summary, build, {**PLAIN[base].defaults, **OBJECTIVE, **_RULE})


def _untuned(method: Method) -> Method:
    """Return a method with every setting left to the library, which is told how long the run is."""
    summary = f"{method.summary}, by the library's defaults"
    defaults = {**method.defaults, "interval": None, "total_steps": "auto"}
    return replace(method, name=f"{method.name}-untuned", summary=summary, defaults=defaults)


def _muon(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    optimizer = MuonAndAdamW(problem.model, hyper["lr"], hyper["momentum"], hyper["betas"], hyper["weight_decay"])
    return TunedStepper(problem, rate_rule(optimizer, hyper), hyper, budget)


def _rate_and_momentum(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    own = {name: hyper[name] for name in ("lr", "momentum", "weight_decay")}
    factory = meta_optimizer(rate_and_momentum.META_OPTIMIZER, hyper)
    rule = apo.RateAndMomentum(torch.optim.SGD(problem.parameters, **own), factory)
    return TunedStepper(problem, rule, hyper, budget)


_RATE = {base: _method(base) for base in ("sgd", "sgdm", "rmsprop", "adam", "adamw")}
_ADAMW = _untuned(_RATE["adamw"])
_METHODS = (
    *_RATE.values(),
    Method(
        "apo-rate-momentum",
        "SGD whose learning rate and momentum APO learns together",
        _rate_and_momentum,
        COMMON | {"lr": 0.01, "momentum": 0.9} | OBJECTIVE | described(rate_and_momentum.META_OPTIMIZER),
    ),
    _untuned(_RATE["sgdm"]),
    _ADAMW,
    Method(
        "muon-apo-untuned",
        "Muon for matrices and AdamW for the rest, with one rate that APO learns",
        _muon,
        {**_ADAMW.defaults, "momentum": 0.95},
    ),
)

#: Methods whose rate is learned.
RATE: dict[str, Method] = {method.name: method for method in _METHODS}
