"""DoG with its averaging (package dog-optimizer) and Mechanic (package mechanic-pytorch).

Both keep what they know beside the states of the parameters, so their steppers save it themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apo_experiments.errors import required
from apo_experiments.method import Method, Stepper
from apo_experiments.methods.hyper import COMMON
from apo_experiments.methods.plain import PlainStepper
from apo_experiments.methods.saved_state import copied_to, load_plain_state, plain_state
from apo_experiments.problem import Budget, Problem

#: Module and package of each.
_DOG, _MECHANIC = ("dog", "dog-optimizer"), ("mechanic_pytorch", "mechanic-pytorch")


@final
class _DoGStepper(PlainStepper):
    """Averages the weights as DoG's authors do, and puts the average into the network where it is evaluated."""

    def __init__(self, problem: Problem, optimizer: Optimizer, hyper: Mapping[str, Any], budget: Budget) -> None:
        super().__init__(problem, optimizer, hyper, budget)
        self._averager = required(_DOG[0], "rivals", _DOG[1]).PolynomialDecayAverager(problem.model)
        self._own: dict[str, Tensor] | None = None  # the network's weights, while it holds the average

    def before_pass(self) -> None:
        if self._own is not None:
            self.problem.model.load_state_dict(self._own)
            self._own = None

    def after_step(self) -> None:
        self._averager.step()
        if self.steps % self.budget.steps_per_epoch == 0:
            self._own = {name: value.clone() for name, value in self.problem.model.state_dict().items()}
            self.problem.model.load_state_dict(self._averager.averaged_model.state_dict())

    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["eta"][0])

    def optimizer_state(self) -> dict[str, Any]:
        started = not self.optimizer._first_step  # type: ignore[attr-defined]
        averager = self._averager.state_dict()
        return {**plain_state(self.optimizer), "started": started, "averager": averager, "own": self._own}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        load_plain_state(self.optimizer, state)
        self.optimizer._first_step = not state["started"]  # type: ignore[attr-defined]
        self._averager.load_state_dict(state["averager"])
        self._own = None if state["own"] is None else dict(state["own"])


@final
class _MechanicStepper(PlainStepper):
    """Reports Mechanic's scale times the rate of the schedule."""

    def rate(self) -> float:
        known = self.optimizer.state.get("_mechanic")  # type: ignore[call-overload]
        scale = float(known["s"].sum()) if known else 0.0
        return scale * super().rate()

    def optimizer_state(self) -> dict[str, Any]:
        known = dict(self.optimizer.state.pop("_mechanic", {}))  # type: ignore[call-overload]
        try:
            base = self.optimizer.state_dict()
        finally:
            if known:
                self.optimizer.state["_mechanic"] = known  # type: ignore[index]
        scalars = {key: value for key, value in known.items() if isinstance(key, str)}
        return {"base": base, "scalars": scalars, "references": [known.get(p) for p in self.problem.parameters]}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["base"])
        if state["scalars"]:
            device = self.problem.parameters[0].device
            references = zip(self.problem.parameters, state["references"], strict=True)
            known = {**copied_to(state["scalars"], device), **{p: copied_to(saved, device) for p, saved in references}}
            self.optimizer.state["_mechanic"] = known  # type: ignore[index]


def _dog(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    dog = required(_DOG[0], "rivals", _DOG[1])
    normalised = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in problem.model.modules())
    first = hyper["reps_rel"] or (1e-4 if normalised else 1e-6)  # what its authors suggest
    optimizer = dog.DoG(problem.parameters, reps_rel=first, lr=hyper["lr"], weight_decay=hyper["weight_decay"])
    return _DoGStepper(problem, optimizer, hyper, budget)


def _mechanic(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
    mechanize = required(_MECHANIC[0], "rivals", _MECHANIC[1]).mechanize
    own = {name: hyper[name] for name in ("lr", "betas", "weight_decay")}
    # With differences stored, which its authors call slightly more accurate: recomputing them divides by zero at first.
    optimizer = mechanize(torch.optim.AdamW, store_delta=True)(problem.parameters, **own)
    return _MechanicStepper(problem, optimizer, hyper, budget)


#: Methods from packages of their own, which are imported when one of them is built.
TUNERS: dict[str, Method] = {
    name: Method(name, summary, build, COMMON | {"lr": 1.0} | own, needs)
    for name, summary, build, own, needs in (
        ("dog", "DoG: distance over gradients, with averaged weights", _dog, {"reps_rel": None}, _DOG),
        ("mechanic", "AdamW whose rate Mechanic scales", _mechanic, {"betas": (0.9, 0.999)}, _MECHANIC),
    )
}
