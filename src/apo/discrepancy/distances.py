"""Distances between outputs: the FSD of regression."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from .base import ElementwiseDiscrepancy, OutputSelector, Reduction, average, keep_masked_in, paired_tensors


@final
class SquaredError(ElementwiseDiscrepancy):
    r"""Squared distance between outputs: summed over each example, or on the scale of torch's loss.

    .. math:: \texttt{"sum"}: \; \frac1n \sum_i \tfrac12 \|z'_i - z_i\|^2, \qquad
              \texttt{"mean"}: \; \frac{1}{nd} \sum_{i,j} (z'_{ij} - z_{ij})^2.

    ``"sum"`` is the KL divergence of unit-variance Gaussians, whose Hessian is the identity. ``"mean"`` is the Bregman
    divergence of ``torch.nn.functional.mse_loss``, hence without a factor of one half.

    Args:
        reduction: ``"sum"`` or ``"mean"``, as above.
        output: See :class:`Discrepancy`.

    Example:
        >>> old, new = torch.zeros(4, 3), torch.full((4, 3), 2.0)
        >>> SquaredError()(new, old).item(), SquaredError("mean")(new, old).item()
        (6.0, 4.0)
    """

    def __init__(self, reduction: Reduction = "sum", output: OutputSelector = None) -> None:
        super().__init__(reduction, output)

    def of_elements(self, new: Tensor, old: Tensor) -> Tensor:
        """Return the square of each difference, or half of it."""
        square = (new - old).square()
        return square / 2 if self.reduction == "sum" else square

    def residual(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Return the distance from a target with unit variance."""
        return torch.randn(output.shape, generator=generator).to(output)


@final
class HuberDistance(ElementwiseDiscrepancy):
    r"""A distance that is quadratic in small changes of an output and linear in large ones.

    With :math:`d = |z' - z|` and slope :math:`s`, each output contributes

    .. math:: \frac{s\,d^2}{2\delta} \;\text{ if }\; d < \delta, \qquad
              s\,\big(d - \tfrac{\delta}{2}\big) \;\text{ otherwise.}

    It is ``torch.nn.SmoothL1Loss(beta=delta)`` between new and old outputs if the slope is 1, and
    ``torch.nn.HuberLoss(delta)`` if the slope is :math:`\delta`. A loss that grows linearly is outweighed by
    :class:`SquaredError` where outputs have far to go: use this one.

    Far from the targets, such a loss is curved on the scale of the distance to them, and flat on any smaller scale. So
    :math:`\delta` is at least the mean distance of the old outputs from the targets, if these are known: otherwise the
    term would outweigh a loss whose targets are in the tens or thousands.

    Args:
        delta: Where the distance becomes linear, in the unit of the outputs; or the mean distance from the targets, if
            that is more.
        slope: How fast it grows from there on.
        reduction: Over the event dimensions (all but the first): ``"sum"`` them, or take the ``"mean"`` over all
            elements. Examples are averaged in both.
        output: See :class:`Discrepancy`.

    Example:
        >>> old, new = torch.zeros(4, 3), torch.full((4, 3), 2.0)
        >>> HuberDistance()(new, old).item(), HuberDistance()(new, old, target=torch.full((4, 3), 8.0)).item()
        (4.5, 0.75)
    """

    def __init__(
        self, delta: float = 1.0, slope: float = 1.0, reduction: Reduction = "sum", output: OutputSelector = None
    ) -> None:
        for name, value in (("delta", delta), ("slope", slope)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}: use 1 if in doubt")
        self.delta, self.slope = float(delta), float(slope)
        super().__init__(reduction, output)

    def between(self, new: Any, old: Any, mask: Tensor | None, target: Any) -> Tensor:
        """Evaluate the distance; if the targets are known, delta is at least the mean distance to them."""
        pairs = paired_tensors(new, old)
        if len(pairs) > 1 or not (isinstance(target, Tensor) and target.shape == pairs[0][1].shape):
            return super().between(new, old, mask, target)
        moved, still = keep_masked_in(mask, pairs[0][0].shape, *pairs[0])
        (missing,) = keep_masked_in(mask, still.shape, (still - target).abs())
        delta = average(missing, mask, "mean").clamp(min=self.delta)
        distance = (moved - still).abs()
        near = distance.square() / (2.0 * delta)
        return average(torch.where(distance < delta, near, distance - delta / 2.0) * self.slope, mask, self.reduction)

    def of_elements(self, new: Tensor, old: Tensor) -> Tensor:
        """Return the distance of each element."""
        return functional.smooth_l1_loss(new, old, reduction="none", beta=self.delta) * self.slope
