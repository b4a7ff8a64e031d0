"""Squared error between outputs: the FSD of regression."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from .base import Reduction, TensorDiscrepancy, average, check_reduction, keep_masked_in
from .outputs import OutputSelector


@final
class SquaredError(TensorDiscrepancy):
    r"""Squared distance between outputs: summed over each example, or on the scale of torch's loss.

    .. math:: \texttt{"sum"}: \; \frac1n \sum_i \tfrac12 \|z'_i - z_i\|^2, \qquad
              \texttt{"mean"}: \; \frac{1}{nd} \sum_{i,j} (z'_{ij} - z_{ij})^2.

    ``"sum"`` is the KL divergence of unit-variance Gaussians, whose Hessian is the identity. ``"mean"`` is the Bregman
    divergence of ``torch.nn.functional.mse_loss``, hence without a factor of one half.

    Args:
        reduction: ``"sum"`` or ``"mean"``, as above.
        output: See :class:`Discrepancy`.

    Example:
        >>> import torch
        >>> old, new = torch.zeros(4, 3), torch.full((4, 3), 2.0)
        >>> SquaredError()(new, old).item(), SquaredError("mean")(new, old).item()
        (6.0, 4.0)
    """

    def __init__(self, reduction: Reduction = "sum", output: OutputSelector = None) -> None:
        super().__init__(output)
        self.reduction: Reduction = check_reduction(reduction)

    def between_tensors(self, new: Tensor, old: Tensor, mask: Tensor | None) -> Tensor:
        """Evaluate the squared error for outputs of shape ``[examples, *event]``."""
        new, old = keep_masked_in(mask, new.shape, new, old)
        square = (new - old).square()
        return average(square / 2 if self.reduction == "sum" else square, mask, self.reduction)

    def residual(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Return the distance from a target with unit variance."""
        return torch.randn(output.shape, generator=generator).to(output)
