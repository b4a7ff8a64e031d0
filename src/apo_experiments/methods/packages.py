"""Newer competitors, from the package pytorch-optimizer: Shampoo, SOAP, PSGD Kron, Schedule-Free and Prodigy."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from apo_experiments.errors import UserError
from apo_experiments.method import Method, Stepper
from apo_experiments.methods.hyper import COMMON, choose
from apo_experiments.methods.plain import Driver, PlainStepper
from apo_experiments.methods.saved_state import load_plain_state, plain_state
from apo_experiments.problem import Budget, Problem

__all__ = ["PACKAGES", "EstimatingDriver", "PackageDriver", "package"]

_GRAFTS = ("none", "sgd", "adagrad", "rmsprop")

#: PSGD balances the norms of its factors at one step in this many.
_BALANCE_EVERY = 100


def package() -> Any:
    """Return the package.

    Raises:
        UserError: It is not installed.
    """
    try:
        import pytorch_optimizer
    except ImportError:
        raise UserError(
            "this method comes from the package pytorch-optimizer: pip install 'pytorch-optimizer==4.1.0'."
        ) from None
    return pytorch_optimizer


class _SavedPlainly(Driver, ABC):
    """An optimizer of the package, saved as plain data: torch's own loader cannot read back all of them."""

    def state_dict(self) -> dict[str, Any]:
        """Return groups and states."""
        return plain_state(self.optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load them."""
        load_plain_state(self.optimizer, state)


@final
class PackageDriver(_SavedPlainly):
    """An optimizer that needs nothing special."""


@final
class _KronDriver(_SavedPlainly):
    """Balances at fixed steps instead of random ones, so that a resumed run is the same run."""

    def before_pass(self, step: int) -> None:
        self.optimizer.balance_prob = float((step + 1) % _BALANCE_EVERY == 0)  # type: ignore[attr-defined]


@final
class _ScheduleFreeDriver(_SavedPlainly):
    """Uses the averaged weights at the end of an epoch, where a network is evaluated."""

    def __init__(self, optimizer: Optimizer, budget: Budget) -> None:
        super().__init__(optimizer)
        self._steps_per_epoch = budget.steps_per_epoch

    def before_pass(self, step: int) -> None:
        self.optimizer.train()  # type: ignore[attr-defined]

    def after_step(self, step: int) -> None:
        if (step + 1) % self._steps_per_epoch == 0:
            self.optimizer.eval()  # type: ignore[attr-defined]


@final
class EstimatingDriver(_SavedPlainly):
    """Reports the rate of Prodigy and D-Adaptation: their estimate d times ``lr``."""

    def rate(self) -> float:
        """Return the product."""
        group = self.optimizer.param_groups[0]
        d: float | Tensor = group["d"]
        return float(group["lr"]) * float(d)


def _shampoo(params: list[nn.Parameter], h: Mapping[str, Any], budget: Budget) -> Driver:
    source = package()
    graft = getattr(source.optimizer.shampoo.LayerWiseGrafting, choose("graft", h["graft"], _GRAFTS).upper())
    optimizer = source.ScalableShampoo(
        params,
        lr=h["lr"],
        betas=h["betas"],
        weight_decay=h["weight_decay"],
        start_preconditioning_step=h["start_step"],
        preconditioning_compute_steps=h["inverse_interval"],
        block_size=h["block_size"],
        # Merging small dimensions would leave layers of up to `block_size` weights without any preconditioner.
        shape_interpretation=False,
        graft_type=graft,
        matrix_eps=h["matrix_eps"],
    )
    return PackageDriver(optimizer)


def _soap(params: list[nn.Parameter], h: Mapping[str, Any], budget: Budget) -> Driver:
    optimizer = package().SOAP(
        params,
        lr=h["lr"],
        betas=h["betas"],
        weight_decay=h["weight_decay"],
        precondition_frequency=h["inverse_interval"],
        max_precondition_dim=h["max_dim"],
    )
    return PackageDriver(optimizer)


def _kron(params: list[nn.Parameter], h: Mapping[str, Any], budget: Budget) -> Driver:
    optimizer = package().Kron(
        params,
        lr=h["lr"],
        momentum=h["momentum"],
        weight_decay=h["weight_decay"],
        pre_conditioner_update_probability=h["update_probability"],
        max_size_triangular=h["max_dim"],
    )
    return _KronDriver(optimizer)


def _schedule_free_sgd(params: list[nn.Parameter], h: Mapping[str, Any], budget: Budget) -> Driver:
    optimizer = package().ScheduleFreeSGD(
        params, lr=h["lr"], momentum=h["momentum"], weight_decay=h["weight_decay"], warmup_steps=h["warmup_steps"]
    )
    return _ScheduleFreeDriver(optimizer, budget)


def _schedule_free_adamw(params: list[nn.Parameter], h: Mapping[str, Any], budget: Budget) -> Driver:
    optimizer = package().ScheduleFreeAdamW(
        params, lr=h["lr"], betas=h["betas"], weight_decay=h["weight_decay"], warmup_steps=h["warmup_steps"]
    )
    return _ScheduleFreeDriver(optimizer, budget)


def _prodigy(params: list[nn.Parameter], h: Mapping[str, Any], budget: Budget) -> Driver:
    optimizer = package().Prodigy(
        params,
        lr=h["lr"],
        betas=h["betas"],
        d0=h["d0"],
        d_coef=h["d_coef"],
        weight_decay=h["weight_decay"],
        bias_correction=True,
        safeguard_warmup=True,
    )
    return EstimatingDriver(optimizer)


def _method(
    name: str,
    summary: str,
    drive: Callable[[list[nn.Parameter], Mapping[str, Any], Budget], Driver],
    own: dict[str, Any],
) -> Method:
    def build(problem: Problem, hyper: Mapping[str, Any], budget: Budget) -> Stepper:
        parameters = [p for p in problem.model.parameters() if p.requires_grad]
        return PlainStepper(problem, [drive(parameters, hyper, budget)], hyper, budget)

    return Method(name, summary, build, COMMON | own)


_METHODS = (
    _method(
        "shampoo",
        "Shampoo, scalable form with grafting",
        _shampoo,
        {
            "lr": 0.1,
            "betas": (0.9, 0.999),
            "inverse_interval": 20,
            "start_step": 25,
            "block_size": 512,
            "graft": "sgd",
            "matrix_eps": 1e-6,
        },
    ),
    _method(
        "soap",
        "SOAP: Adam in Shampoo's eigenbasis",
        _soap,
        {"lr": 3e-3, "betas": (0.95, 0.95), "inverse_interval": 10, "max_dim": 10_000},
    ),
    _method(
        "psgd-kron",
        "PSGD with Kronecker factors",
        _kron,
        {"lr": 1e-3, "momentum": 0.9, "update_probability": None, "max_dim": 8192},
    ),
    _method(
        "schedule-free-sgd",
        "Schedule-Free SGD",
        _schedule_free_sgd,
        {"lr": 1.0, "momentum": 0.9, "warmup_steps": 0},
    ),
    _method(
        "schedule-free-adamw",
        "Schedule-Free AdamW",
        _schedule_free_adamw,
        {"lr": 2.5e-3, "betas": (0.9, 0.999), "warmup_steps": 0},
    ),
    _method(
        "prodigy",
        "Prodigy: Adam that estimates its own rate",
        _prodigy,
        {"lr": 1.0, "betas": (0.9, 0.999), "d0": 1e-6, "d_coef": 1.0},
    ),
)

#: Methods from the package pytorch-optimizer, which is imported when one of them is built.
PACKAGES: dict[str, Method] = {method.name: method for method in _METHODS}
