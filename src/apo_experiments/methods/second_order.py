"""Training with KFAC and EKFAC: the likelihood of the loss, and when to update the curvature."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

import apo
from apo.discrepancy import for_loss
from apo.discrepancy.base import select_output
from apo_experiments.baselines import EKFAC, KFAC, CurvatureOptimizer
from apo_experiments.errors import UserError
from apo_experiments.method import Method
from apo_experiments.methods.hyper import COMMON
from apo_experiments.methods.passes import forward, forward_context
from apo_experiments.methods.plain import PlainStepper
from apo_experiments.problem import Budget, Problem

#: Hyperparameters beside the common ones.
_DEFAULTS: dict[str, Any] = {
    "lr": 0.01,
    "momentum": 0.9,
    "damping": 1e-2,
    "ema": 0.95,
    "statistics_interval": 5,
    "inverse_interval": 20,
    "kl_clip": None,
}


@dataclass(frozen=True)
class Likelihood:
    """The distribution whose negative log-likelihood, up to a factor, is the training loss.

    Attributes:
        kind: ``"categorical"``, ``"bernoulli"`` or ``"gaussian"``.
        discrepancy: The divergence that belongs to the loss, with its output and dimension.
    """

    kind: str
    discrepancy: apo.Discrepancy

    @classmethod
    def of(cls, discrepancy: apo.Discrepancy) -> Likelihood:
        """Return the distribution that a divergence belongs to."""
        kinds = {
            apo.CategoricalKL: "categorical",
            apo.BernoulliKL: "bernoulli",
            apo.GaussianKL: "gaussian",
            apo.SquaredError: "gaussian",
        }
        # KFAC samples targets from logits, or from means of known variance.
        if type(discrepancy) not in kinds or getattr(discrepancy, "of", None) in ("probabilities", "variance"):
            raise UserError(
                f"KFAC needs a loss that is a log-likelihood, but the task's divergence is "
                f"{type(discrepancy).__name__}: use another method."
            )
        return cls(kinds[type(discrepancy)], discrepancy)

    def output(self, output: Any) -> Tensor:
        """Take the distribution's parameters out of what the network returns, classes in the last dimension."""
        tensor = select_output(output, self.discrepancy.output)
        if isinstance(self.discrepancy, apo.CategoricalKL):
            dim = self.discrepancy.dim
            return tensor.movedim(min(1, tensor.ndim - 1) if dim == "torch" else dim, -1)
        return tensor

    def scale(self, output: Tensor) -> float:
        """Return the factor between the loss of an example and its negative log-likelihood."""
        if getattr(self.discrepancy, "reduction", "sum") != "mean":
            return 1.0
        size = output[0].numel()
        return 2.0 / size if isinstance(self.discrepancy, apo.SquaredError) else 1.0 / size


@final
class _CurvatureStepper(PlainStepper):
    """Observes the curvature when it is time; steps without statistics run as fast as plain ones."""

    optimizer: CurvatureOptimizer

    def __init__(
        self, kind: type[CurvatureOptimizer], problem: Problem, hyper: Mapping[str, Any], budget: Budget
    ) -> None:
        options = {key: hyper[key] for key in (*_DEFAULTS, "weight_decay")}
        super().__init__(problem, kind(problem.model, **options), hyper, budget)
        try:
            found = problem.discrepancy
            self._likelihood = Likelihood.of(found if isinstance(found, apo.Discrepancy) else for_loss(problem.loss))
        except ValueError as error:
            raise UserError(f"KFAC does not know which likelihood the task's loss is: {error}") from None

    def compute(self, inputs: Any, target: Any) -> Tensor:
        """Forward, look at the curvature if it is time, backward."""
        if not self.optimizer.wants_statistics:
            return super().compute(inputs, target)
        model, likelihood = self.problem.model, self._likelihood
        self.optimizer.zero_grad()
        with forward_context(model, self.hyper["precision"]):
            output = forward(model, inputs)
            loss = self.problem.loss(output, target)
        tensor = likelihood.output(output)
        self.optimizer.observe(tensor, likelihood.kind, scale=likelihood.scale(tensor))
        loss.backward()
        return loss.detach()


#: Methods with Kronecker-factored curvature.
SECOND_ORDER: dict[str, Method] = {
    name: Method(name, summary, functools.partial(_CurvatureStepper, kind), COMMON | _DEFAULTS)
    for name, kind, summary in (
        ("kfac", KFAC, "Kronecker-factored natural gradient"),
        ("ekfac", EKFAC, "KFAC's eigenbasis with second moments of the gradient"),
    )
}
