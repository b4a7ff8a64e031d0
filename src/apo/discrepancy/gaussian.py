"""KL divergence between diagonal Gaussians: regression with learned or with known noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from .base import Discrepancy, Reduction, average, check_reduction, keep_masked_in
from .outputs import OutputSelector, comparable_pair, describe, paired_tensors


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

    Example:
        >>> mean, log_variance = torch.zeros(4, 3), torch.zeros(4, 3)
        >>> GaussianKL()((mean + 1, log_variance), (mean, log_variance)).item()
        1.5
        >>> GaussianKL(variance=0.5)(mean + 1, mean).item()
        3.0
    """

    def __init__(
        self, variance: float | None = None, reduction: Reduction = "sum", output: OutputSelector = None
    ) -> None:
        super().__init__(output)
        if variance is not None and not variance > 0:
            raise ValueError(f"variance must be positive, got {variance}: pass None if the network predicts it")
        self.variance = variance
        self.reduction: Reduction = check_reduction(reduction)

    def between(self, new: Any, old: Any, mask: Tensor | None, target: Any) -> Tensor:
        """Evaluate the KL divergence for means alone or for pairs of mean and log-variance."""
        del target
        if self.variance is None:
            return self._learned_variance(_mean_and_log_variance(new), _mean_and_log_variance(old), mask)
        divergences = []
        for pair in paired_tensors(new, old):
            new_mean, old_mean = keep_masked_in(mask, pair[0].shape, *pair)
            divergences.append(average((new_mean - old_mean).square() / (2 * self.variance), mask, self.reduction))
        return torch.stack(divergences).sum()

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


def _mean_and_log_variance(outputs: Any) -> tuple[Tensor, Tensor]:
    pair = outputs
    if isinstance(outputs, Mapping) and "mean" in outputs and "log_variance" in outputs:
        pair = (outputs["mean"], outputs["log_variance"])
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        mean, log_variance = pair
        if all(isinstance(part, Tensor) and part.is_floating_point() for part in pair):
            return mean, log_variance
    raise TypeError(
        f"outputs must be (mean, log_variance) for GaussianKL without a variance, got {describe(outputs)}: "
        "return both from the network, or pass variance=..."
    )
