"""Newer competitors, from the package pytorch-optimizer.

Each has the defaults that its authors document; a warm-up that depends on the length of a run is a share of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from apo_experiments.errors import choose, required
from apo_experiments.method import Method, Stepper
from apo_experiments.methods.hyper import COMMON
from apo_experiments.methods.plain import PlainStepper
from apo_experiments.methods.saved_state import load_plain_state, plain_state
from apo_experiments.methods.schedules import WARM_UP
from apo_experiments.problem import Budget, Problem

_NEEDS = ("pytorch_optimizer", "pytorch-optimizer")

_GRAFTS = ("none", "sgd", "adagrad", "rmsprop")

#: PSGD balances the norms of its factors at one step in this many.
_BALANCE_EVERY = 100


class _PackageStepper(PlainStepper):
    """Saves an optimizer of the package as plain data: torch's own loader cannot read back all of them."""

    def optimizer_state(self) -> dict[str, Any]:
        return plain_state(self.optimizer)

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        load_plain_state(self.optimizer, state)


@final
class _KronStepper(_PackageStepper):
    """Balances at fixed steps instead of random ones, so that a resumed run is the same run."""

    def before_pass(self) -> None:
        self.optimizer.balance_prob = float((self.steps + 1) % _BALANCE_EVERY == 0)  # type: ignore[attr-defined]


@final
class _FreeStepper(_PackageStepper):
    """Uses the averaged weights at the end of an epoch, where a network is evaluated."""

    def before_pass(self) -> None:
        self.optimizer.train()  # type: ignore[attr-defined]

    def after_step(self) -> None:
        if self.steps % self.budget.steps_per_epoch == 0:
            self.optimizer.eval()  # type: ignore[attr-defined]


@final
class _EstimatingStepper(_PackageStepper):
    """Reports the rate of Prodigy and D-Adaptation: their estimate d times ``lr``."""

    def rate(self) -> float:
        return super().rate() * float(self.optimizer.param_groups[0]["d"])


def _method(
    name: str,
    summary: str,
    optimizer: str,
    own: dict[str, Any],
    stepper: type[_PackageStepper] = _PackageStepper,
    names: Mapping[str, str] | None = None,
    **fixed: Any,
) -> Method:
    """Return a method of the package.

    Args:
        name: Of the method.
        summary: What it is.
        optimizer: The class in the package.
        own: Hyperparameters beside the common ones, all of which the class takes.
        stepper: How it is used and saved.
        names: What the class calls hyperparameters, if not as we do.
        fixed: Further arguments of the class.
    """

    def build(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
        given = {(names or {}).get(key, key): hyper[key] for key in (*own, "weight_decay")}
        if name.endswith("-warm"):  # as the authors of Schedule-Free advise
            given["warmup_steps"] = round(WARM_UP * budget.steps)
        package = required(_NEEDS[0], package=_NEEDS[1])
        if "graft_type" in given:
            graft = choose("graft", hyper["graft"], _GRAFTS)
            given["graft_type"] = package.optimizer.shampoo.LayerWiseGrafting[graft.upper()]
        built = getattr(package, optimizer)(problem.parameters, **given, **fixed)
        return stepper(problem, built, hyper, budget)

    return Method(name, summary, build, COMMON | own, _NEEDS)


_SHAMPOO = {
    **{"lr": 0.1, "betas": (0.9, 0.999), "inverse_interval": 20, "start_step": 25, "block_size": 512},
    **{"graft": "sgd", "matrix_eps": 1e-6},
}
_SHAMPOO_NAMES = {
    "inverse_interval": "preconditioning_compute_steps",
    "start_step": "start_preconditioning_step",
    "graft": "graft_type",
}
_SOAP = {"lr": 3e-3, "betas": (0.95, 0.95), "inverse_interval": 10, "max_dim": 10_000}
_SOAP_NAMES = {"inverse_interval": "precondition_frequency", "max_dim": "max_precondition_dim"}
_KRON = {"lr": 1e-3, "momentum": 0.9, "update_probability": None, "max_dim": 8192}
_KRON_NAMES = {"update_probability": "pre_conditioner_update_probability", "max_dim": "max_size_triangular"}
_FREE_SGD, _FREE_ADAMW = {"lr": 1.0, "momentum": 0.9}, {"lr": 2.5e-3, "betas": (0.9, 0.999)}
_NO_RISE = {"warmup_steps": 0}
_ESTIMATE = {"lr": 1.0, "betas": (0.9, 0.999), "d0": 1e-6}
_PRODIGY = {**_ESTIMATE, "d_coef": 1.0}
_GUARDED: dict[str, Any] = {"bias_correction": True, "safeguard_warmup": True}
_OWN: dict[str, Any] = {"weight_decouple": True}

_METHODS = (
    # Merging small dimensions would leave layers of up to `block_size` weights without any preconditioner.
    _method(
        "shampoo",
        "Shampoo, scalable form with grafting",
        "ScalableShampoo",
        _SHAMPOO,
        names=_SHAMPOO_NAMES,
        shape_interpretation=False,
    ),
    _method("soap", "SOAP: Adam in Shampoo's eigenbasis", "SOAP", _SOAP, names=_SOAP_NAMES),
    _method("psgd-kron", "PSGD with Kronecker factors", "Kron", _KRON, _KronStepper, _KRON_NAMES),
    _method("schedule-free-sgd", "Schedule-Free SGD", "ScheduleFreeSGD", _FREE_SGD | _NO_RISE, _FreeStepper),
    _method("schedule-free-adamw", "Schedule-Free AdamW", "ScheduleFreeAdamW", _FREE_ADAMW | _NO_RISE, _FreeStepper),
    _method("schedule-free-sgd-warm", "Schedule-Free SGD with a warm-up", "ScheduleFreeSGD", _FREE_SGD, _FreeStepper),
    _method(
        "schedule-free-adamw-warm", "Schedule-Free AdamW with a warm-up", "ScheduleFreeAdamW", _FREE_ADAMW, _FreeStepper
    ),
    _method(
        "prodigy", "Prodigy: Adam that estimates its own rate", "Prodigy", _PRODIGY, _EstimatingStepper, **_GUARDED
    ),
    _method(
        "d-adaptation", "Adam whose rate D-Adaptation estimates", "DAdaptAdam", _ESTIMATE, _EstimatingStepper, **_OWN
    ),
    _method("adamg", "AdamG: Adam scaled by the size of gradients", "AdamG", {"lr": 1.0}),
)

#: Methods from the package pytorch-optimizer, which is imported when one of them is built.
PACKAGES: dict[str, Method] = {method.name: method for method in _METHODS}
