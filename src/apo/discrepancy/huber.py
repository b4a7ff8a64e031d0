"""Huber's distance between outputs: the FSD of regression with robust losses."""

from __future__ import annotations

from typing import final

from torch import Tensor
from torch.nn import functional

from .base import Reduction, TensorDiscrepancy, average, check_reduction, keep_masked_in
from .outputs import OutputSelector


@final
class HuberDistance(TensorDiscrepancy):
    r"""A distance that is quadratic in small changes of an output and linear in large ones.

    With :math:`d = |z' - z|` and slope :math:`s`, each output contributes

    .. math:: \frac{s\,d^2}{2\delta} \;\text{ if }\; d < \delta, \qquad
              s\,\big(d - \tfrac{\delta}{2}\big) \;\text{ otherwise.}

    It is ``torch.nn.SmoothL1Loss(beta=delta)`` between new and old outputs if the slope is 1, and
    ``torch.nn.HuberLoss(delta)`` if the slope is :math:`\delta`. A loss that grows linearly is outweighed by
    :class:`SquaredError` where outputs have far to go: use this one.

    Args:
        delta: Where the distance becomes linear, in the unit of the outputs.
        slope: How fast it grows from there on.
        reduction: Over the event dimensions (all but the first): ``"sum"`` them, or take the ``"mean"`` over all
            elements. Examples are averaged in both.
        output: See :class:`Discrepancy`.

    Example:
        >>> import torch
        >>> HuberDistance()(torch.full((4, 3), 2.0), torch.zeros(4, 3)).item()
        4.5
    """

    def __init__(
        self, delta: float = 1.0, slope: float = 1.0, reduction: Reduction = "sum", output: OutputSelector = None
    ) -> None:
        super().__init__(output)
        for name, value in (("delta", delta), ("slope", slope)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}: use 1 if in doubt")
        self.delta, self.slope = float(delta), float(slope)
        self.reduction: Reduction = check_reduction(reduction)

    def between_tensors(self, new: Tensor, old: Tensor, mask: Tensor | None) -> Tensor:
        """Evaluate the distance for outputs of shape ``[examples, *event]``."""
        new, old = keep_masked_in(mask, new.shape, new, old)
        distances = functional.smooth_l1_loss(new, old, reduction="none", beta=self.delta)
        return average(distances * self.slope, mask, self.reduction)
