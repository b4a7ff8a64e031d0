"""KL divergence between diagonal Gaussians: regression with learned or with known noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final

import torch
from torch import Tensor

from .base import Discrepancy, Reduction, average, check_reduction, keep_masked_in
from .outputs import OutputSelector, comparable_pair, describe, paired_tensors

#: What ``torch.nn.GaussianNLLLoss`` raises smaller variances to.
_SMALLEST_VARIANCE = 1e-6


@final
class GaussianKL(Discrepancy):
    r"""KL divergence of Gaussians with diagonal covariance.

    With mean :math:`m` and variance :math:`v` at the old, :math:`m'` and :math:`v'` at the new weights, each output
    contributes

    .. math:: \mathrm{KL} = \tfrac12 \Big[\log\frac{v'}{v} + \frac{v + (m' - m)^2}{v'} - 1\Big].

    Its Hessian in :math:`(m', \log v')` at the old values is :math:`\mathrm{diag}(1/v, 1/2)`, the Fisher information.

    Args:
        variance: A known variance; every floating-point output is then a mean. With None the network predicts the
            variance too: it returns a pair ``(mean, log_variance)``, or a mapping with these two keys.
        reduction: Over the event dimensions (all but the first): ``"sum"`` gives the KL divergence of the joint
            distribution of one example, averaged over examples; ``"mean"`` averages over all elements.
        output: See :class:`Discrepancy`.
        of: What a learned variance comes as: ``"log_variance"``, or ``"variance"`` as ``torch.nn.GaussianNLLLoss``
            takes it.

    Example:
        >>> mean, log_variance = torch.zeros(4, 3), torch.zeros(4, 3)
        >>> GaussianKL()((mean + 1, log_variance), (mean, log_variance)).item()
        1.5
        >>> GaussianKL(variance=0.5)(mean + 1, mean).item()
        3.0
    """

    def __init__(
        self,
        variance: float | None = None,
        reduction: Reduction = "sum",
        output: OutputSelector = None,
        of: Literal["log_variance", "variance"] = "log_variance",
    ) -> None:
        super().__init__(output)
        if of not in ("log_variance", "variance"):
            raise ValueError(f'of must be "log_variance" or "variance", got {of!r}: say what the network returns')
        self.of = of
        if variance is not None and not variance > 0:
            raise ValueError(f"variance must be positive, got {variance}: pass None if the network predicts it")
        self.variance = variance
        self.reduction: Reduction = check_reduction(reduction)

    def between(self, new: Any, old: Any, mask: Tensor | None, target: Any) -> Tensor:
        """Evaluate the KL divergence for means alone or for pairs of mean and log-variance."""
        del target
        if self.variance is None:
            return self._learned_variance(self._mean_and_log_variance(new), self._mean_and_log_variance(old), mask)
        divergences = [
            self._known_variance(new_mean, old_mean, mask) for new_mean, old_mean in paired_tensors(new, old)
        ]
        return torch.stack(divergences).sum()

    def _mean_and_log_variance(self, outputs: Any) -> tuple[Tensor, Tensor]:
        mean, variance = _mean_and_variance(outputs, self.of)
        return mean, variance.clamp(min=_SMALLEST_VARIANCE).log() if self.of == "variance" else variance

    def _known_variance(self, new: Tensor, old: Tensor, mask: Tensor | None) -> Tensor:
        assert self.variance is not None
        new, old = keep_masked_in(mask, new.shape, new, old)
        return average((new - old).square() / (2 * self.variance), mask, self.reduction)

    def _learned_variance(self, new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        new_mean, old_mean = comparable_pair(new[0], old[0], "mean")
        new_log, old_log = comparable_pair(new[1], old[1], "log_variance")
        new_mean, old_mean, new_log, old_log = torch.broadcast_tensors(new_mean, old_mean, new_log, old_log)
        new_mean, old_mean, new_log, old_log = keep_masked_in(
            mask, new_mean.shape, new_mean, old_mean, new_log, old_log
        )
        log_ratio = new_log - old_log
        # expm1(-d) + d keeps its digits for a small change d of the log-variance; exp(-d) - 1 + d would not.
        divergence = torch.expm1(-log_ratio) + log_ratio + (new_mean - old_mean).square() * torch.exp(-new_log)
        return average(divergence / 2, mask, self.reduction)


def _mean_and_variance(outputs: Any, name: str) -> tuple[Tensor, Tensor]:
    if isinstance(outputs, Mapping) and "mean" in outputs and name in outputs:
        pair = (outputs["mean"], outputs[name])
    else:
        pair = outputs
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        mean, variance = pair
        if all(isinstance(part, Tensor) and part.is_floating_point() for part in pair):
            return mean, variance
    raise TypeError(
        f"outputs must be (mean, {name}) for GaussianKL without a variance, got {describe(outputs)}: "
        "return both from the network, or pass variance=..."
    )
