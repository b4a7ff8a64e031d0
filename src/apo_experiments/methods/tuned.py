"""Training with APO: ordinary steps, and a meta-step at intervals."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import apo
from apo.rules.preconditioned import meta_adam
from apo_experiments.errors import UserError, choose
from apo_experiments.method import Stepper
from apo_experiments.methods.passes import EagerPass, forward_context, network_for_meta_steps, training_pass
from apo_experiments.methods.schedules import build_scheduler
from apo_experiments.problem import Budget, Problem

#: Hyperparameters of the meta-objective; None for the weights leaves them to the rule.
OBJECTIVE: dict[str, Any] = {
    "interval": 10,  # None: the library's, which begins with a meta-step at each of the first steps
    "fsd_weight": None,
    "wsd_weight": None,
    "fsd_batch": "previous",
    "other_batch_share": None,
    "total_steps": None,  # "auto": the tuner is told how long the run is, see apo.core.objective
}

#: Builds a meta-optimizer from phi.
MetaOptimizer = Callable[[list[Tensor]], Optimizer]

#: How many records of meta-steps a checkpoint carries along.
_HISTORY = 100

_META_OPTIMIZERS = ("rmsprop", "corrected-rmsprop", "adam", "sgd")


@final
class TunedStepper(Stepper):
    """Trains with an :class:`apo.APO` tuner.

    Args:
        problem: What is trained.
        rule: The rule whose meta-parameters are learned.
        hyper: Complete hyperparameters, those of :data:`OBJECTIVE` among them.
        budget: How long the run is.

    Attributes:
        tuner: The tuner.
    """

    def __init__(self, problem: Problem, rule: apo.Rule, hyper: Mapping[str, Any], budget: Budget) -> None:
        share = hyper["other_batch_share"]
        if isinstance(share, str):
            raise UserError(f"other_batch_share was {share!r}: it must be a number from 0 to 1, or none.")
        self.tuner = apo.APO(
            rule,
            network_for_meta_steps(problem, hyper),
            criterion=problem.loss,
            discrepancy=problem.discrepancy,
            interval="auto" if hyper["interval"] is None else hyper["interval"],
            fsd_weight=hyper["fsd_weight"],
            wsd_weight=hyper["wsd_weight"],
            fsd_batch=choose("fsd_batch", hyper["fsd_batch"], ("previous", "same")),
            other_batch_share=share,
            total_steps=_total_steps(hyper, budget),
            history_limit=_HISTORY,
        )
        self._model, self._hyper = problem.model, hyper
        self._pass = training_pass(problem, hyper)
        warmup = getattr(self.tuner.optimizer, "warmup", None)
        optimizers = [self.tuner.optimizer] if warmup is None else [self.tuner.optimizer, warmup]
        schedulers = (build_scheduler(optimizer, hyper, budget) for optimizer in optimizers)
        # Of the rules' settings, only a preconditioner has one for this: the meta-rate of a rate stays.
        learning = build_scheduler(
            rule.meta_optimizer, {**hyper, "schedule": hyper.get("meta_schedule", "fixed")}, budget
        )
        self._schedulers = [scheduler for scheduler in (*schedulers, learning) if scheduler is not None]

    def step(self, inputs: Any, target: Any) -> Tensor:
        """Take one step: with the tuner's pass if a meta-step will evaluate it again, else with the fastest pass."""
        if self.tuner.is_meta_step() or isinstance(self._pass, EagerPass):
            self.tuner.optimizer.zero_grad()
            with forward_context(self._model, self._hyper["precision"]):
                loss = self.tuner.backward(inputs, target)
        else:
            loss = self._pass(inputs, target)
            with forward_context(self._model, self._hyper["precision"]):
                self.tuner.record(inputs, target)
        if self._hyper["clip_grad_norm"] is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._hyper["clip_grad_norm"])
        self.tuner.step()
        for scheduler in self._schedulers:
            scheduler.step()
        return loss

    def rate(self) -> float:
        r"""Return the current rate; for a preconditioner that of its warm-up, then its mean step per unit of gradient.

        A preconditioner moves the weights by :math:`-\text{scale} \cdot P g`, so its ``lr``, where P starts, says
        nothing of what was learned. The mean is over the eigenvalues of the layers' P at the last meta-step.
        """
        optimizer = self.tuner.optimizer
        group = optimizer.param_groups[0]
        if not isinstance(optimizer, apo.Preconditioner):
            return float(group["lr"])
        if optimizer.warming_up and optimizer.warmup is not None:
            return float(optimizer.warmup.param_groups[0]["lr"])
        mean = self.tuner.history[-1].summary.get("P/mean", 1.0) if len(self.tuner.history) else 1.0
        return float(group["scale"] * group["lr"] / group["reference_lr"] * group["initial_step"] * mean)

    def telemetry(self) -> dict[str, float]:
        """Return the terms of Q at the last meta-step and the rule's own values."""
        if not len(self.tuner.history):
            return {}
        scalars = self.tuner.history[-1].scalars()
        figures = {f"apo/{name}": float(value) for name, value in scalars.items() if not name.startswith("lr/")}
        if "apo/P/mean" in figures:  # the rate in the record is another then
            figures["apo/lr"] = float(self.tuner.optimizer.param_groups[0]["lr"])
        return figures | {"apo/skipped_meta_updates": float(self.tuner.skipped_meta_updates)}

    def state_dict(self) -> dict[str, Any]:
        """Return the tuner, which holds the optimizer and the meta-optimizer, and the schedules."""
        return {
            "tuner": self.tuner.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load them."""
        self.tuner.load_state_dict(state["tuner"])
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)


def _total_steps(hyper: Mapping[str, Any], budget: Budget) -> int | None:
    """Return the ``total_steps`` of the tuner, and raise an error for settings that contradict it."""
    given = hyper["total_steps"]
    if given is None:
        return None
    if given != "auto" and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise UserError(
            f"total_steps was {given!r}: it must be auto (the length of the run), a number of at least 1, or none."
        )
    if hyper["fsd_batch"] == "same":
        raise UserError(
            f"total_steps={given} needs a batch beside the step's own, and fsd_batch=same leaves it out: "
            "--set total_steps=none as well."
        )
    if hyper.get("preset") == "paper":
        raise UserError(
            f"preset=paper means the paper's settings, and total_steps={given} is not one of them: "
            "--set total_steps=none as well."
        )
    return budget.steps if given == "auto" else given


def described(usual: MetaOptimizer) -> dict[str, Any]:
    """Describe a meta-optimizer of the library, RMSprop or Adam, by its hyperparameters."""
    # By its signature, because the first optimizer that torch builds takes a second, and `apo list` needs none.
    settings = {name: parameter.default for name, parameter in inspect.signature(usual).parameters.items()}
    beta1, beta2 = settings.get("betas", (None, settings.get("alpha")))
    name = "rmsprop" if beta1 is None else "adam" if beta1 else "corrected-rmsprop"
    return {"meta_optimizer": name, "meta_lr": settings["lr"], "meta_beta2": beta2}


def meta_optimizer(usual: MetaOptimizer, hyper: Mapping[str, Any]) -> MetaOptimizer:
    """Return the library's meta-optimizer, or one that differs from it where hyperparameters say so.

    Args:
        usual: The library's, which has the defaults.
        hyper: With ``meta_optimizer``: ``"rmsprop"`` (the paper's, for rates), ``"corrected-rmsprop"`` (with bias
            correction), ``"adam"`` or ``"sgd"``; ``meta_lr``, the meta-learning rate; and ``meta_beta2``, the decay of
            the second moment. None is the library's.
    """
    own = described(usual)
    wanted = own | {key: hyper[key] for key in own if hyper[key] is not None}
    if wanted == own:
        return usual
    name, lr, beta2 = wanted.values()
    choose("meta_optimizer", name, _META_OPTIMIZERS)
    if name == "sgd":
        return functools.partial(torch.optim.SGD, lr=lr)
    if name == "rmsprop":
        return functools.partial(torch.optim.RMSprop, lr=lr, alpha=beta2)
    beta1 = 0.0 if name == "corrected-rmsprop" else 0.9
    return functools.partial(meta_adam, lr=lr, betas=(beta1, beta2))
