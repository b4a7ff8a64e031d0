r"""The proximal meta-objective Q, equation (8) of the paper.

.. math::
    Q(\phi) = J_B(\theta'(\phi))
        + \frac{\lambda_{FSD}}{|B'|} \sum_{x \in B'} \rho(f(x, \theta'(\phi)), f(x, \theta))
        + \frac{\lambda_{WSD}}{2} \|\theta'(\phi) - \theta\|^2

A share :math:`\alpha` of the loss term may be taken on the other batch, :math:`(1 - \alpha) J_B + \alpha J_{B'}`. B
cannot see that a part of its gradient is noise, B' sees nothing but what the batches have in common: where gradients
are mostly noise the learned rate falls to :math:`1 - \alpha` of what B alone would have, where they agree it stays.
With :math:`\alpha = 1` short-horizon bias has the rate collapse, which is the ablation of the paper's appendix D. Where
the end of training is known the share rises towards it, see :mod:`apo.core.horizon`.

Coupled weight decay (an L2 penalty that the optimizer adds to the gradient) is part of the loss that the optimizer
minimises, so it belongs to :math:`J_B`; decoupled decay is part of the step and needs no term.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from apo.core.horizon import Horizon
from apo.discrepancy import CategoricalKL, Discrepancy, for_loss
from apo.passes.recording import Recording
from apo.vectors import advance_, norm, wide

__all__ = ["ProximalObjective"]


class ProximalObjective:
    r"""The weights of the three terms and the divergence :math:`\rho` of the function-space term.

    Args:
        fsd_weight: :math:`\lambda_{FSD} \ge 0`.
        wsd_weight: :math:`\lambda_{WSD} \ge 0`.
        discrepancy: :math:`\rho`; ``"auto"`` takes the one that belongs to the loss function.
        criterion: The loss function, or None for a network that computes its own (a language model, say): then
            ``"auto"`` is the KL divergence of categorical outputs.
        mask: Which positions of a batch count, as a function of its recording; ``"auto"`` leaves out the padding
            marked by the criterion's ``ignore_index``, by ``labels`` of -100 or by an ``attention_mask``.
        other_batch_share: :math:`\alpha`, the share of the loss term that is taken on B'; 0 is the paper's.
        total_steps: How long training is, see :mod:`apo.core.horizon`; None if nobody knows.

    Example:
        >>> import torch.nn.functional as F
        >>> objective = ProximalObjective(0.3, 0.0, criterion=F.cross_entropy)
        >>> type(objective.discrepancy).__name__
        'CategoricalKL'
    """

    def __init__(
        self,
        fsd_weight: float,
        wsd_weight: float,
        discrepancy: Discrepancy | str = "auto",
        criterion: Callable | None = None,
        mask: Callable[[Recording], Tensor | None] | str | None = "auto",
        other_batch_share: float = 0.0,
        total_steps: int | None = None,
    ) -> None:
        self.fsd_weight = _weight("fsd_weight", fsd_weight)
        self.wsd_weight = _weight("wsd_weight", wsd_weight)
        self.other_batch_share = _weight("other_batch_share", other_batch_share)
        if other_batch_share > 1:
            raise ValueError(f"other_batch_share must be from 0 to 1, got {other_batch_share}: 0 is the paper's")
        self.horizon = None if total_steps is None else Horizon(total_steps)
        self.discrepancy = _discrepancy(discrepancy, criterion) if self.fsd_weight > 0 else None
        self._ignore_index = _ignore_index(criterion)
        if not (mask is None or mask == "auto" or callable(mask)):
            raise TypeError(f"mask must be 'auto', None or a function of a batch's recording, got {mask!r}")
        self._mask = mask

    @property
    def needs_other_batch(self) -> bool:
        """Whether a batch B' beside B takes part."""
        return self.fsd_weight > 0 or self.needs_other_targets

    @property
    def needs_other_targets(self) -> bool:
        """Whether a loss is taken on B', now or towards the end of training."""
        return self.other_batch_share > 0 or self.horizon is not None

    def share(self, step: int) -> float:
        r"""Return :math:`\alpha` at a step, which is counted from 0: it rises where the end of training is near."""
        nearness = 0.0 if self.horizon is None else self.horizon.nearness(step)
        return self.other_batch_share + (1.0 - self.other_batch_share) * nearness

    def warnings(self, step: int) -> list[str]:
        """Return what the user should know after a step."""
        if self.horizon is None or not self.horizon.is_over(step):
            return []
        return [
            f"training goes on after total_steps={self.horizon.total_steps}, for whose end the rate has fallen: pass "
            "the number of steps that it takes"
        ]

    def fsd(self, new: Any, old: Any, recording: Recording) -> Tensor:
        r"""Return the mean of :math:`\rho(new, old)` over the positions of the batch that count."""
        assert self.discrepancy is not None
        mask = self._padding(recording, new) if self._mask == "auto" else None
        if callable(self._mask):
            mask = self._mask(recording)
        return self.discrepancy(new, old, mask=mask, target=recording.target)

    def _padding(self, recording: Recording, new: Any) -> Tensor | None:
        """Find the mask that the batch itself carries, if its shape fits the outputs."""
        logits = new.get("logits") if isinstance(new, Mapping) else new
        if not isinstance(logits, Tensor):
            return None
        target, ignored = recording.target, recording.loss_kwargs.get("ignore_index", self._ignore_index)
        labelled = ignored is not None and isinstance(target, Tensor) and not target.is_floating_point()
        if labelled and target.numel() * logits.shape[1] == logits.numel():
            return target != ignored
        inputs = recording.calls[0].kwargs
        labels, attended = inputs.get("labels"), inputs.get("attention_mask")
        if isinstance(labels, Tensor) and labels.shape == logits.shape[:-1]:
            return labels != -100
        if isinstance(attended, Tensor) and attended.shape == logits.shape[:-1]:
            return attended.bool()
        return None


def _weight(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and not negative, got {value}: use 0 to leave the term out")
    return float(value)


def _ignore_index(criterion: Callable | None) -> int | None:
    """Return the target that the loss function leaves out, if it has one."""
    if isinstance(criterion, functools.partial):
        return criterion.keywords.get("ignore_index", _ignore_index(criterion.func))
    if criterion in (F.cross_entropy, F.nll_loss):
        return -100
    return getattr(criterion, "ignore_index", None)


def _discrepancy(choice: Discrepancy | str, criterion: Callable | None) -> Discrepancy:
    if isinstance(choice, Discrepancy):
        return choice
    if choice != "auto":
        raise TypeError(f"discrepancy must be 'auto' or an apo.discrepancy.Discrepancy, got {choice!r}")
    if criterion is None:
        return CategoricalKL()
    return for_loss(criterion)


def weight_decay_value(parameters: list[Tensor], coefficients: list[float]) -> Tensor | float:
    """Return the sum of ``coefficient / 2 * ||parameter||^2``: coupled decay as a part of the loss."""
    value: Tensor | float = 0.0
    for decay, indices in by_coefficient(coefficients).items():
        value = value + 0.5 * decay * norm([parameters[i].detach() for i in indices]).square()
    return value


def add_weight_decay_gradient_(gradient: list[Tensor], parameters: list[Tensor], coefficients: list[float]) -> None:
    """Add the gradient of :func:`weight_decay_value` in place."""
    for decay, indices in by_coefficient(coefficients).items():
        advance_([gradient[i] for i in indices], [wide(parameters[i].detach()) for i in indices], decay)


def by_coefficient(coefficients: list[float]) -> dict[float, list[int]]:
    """Return which parameters share a coefficient, for those that have one: usually all of them.

    Example:
        >>> by_coefficient([0.1, 0.0, 0.1])
        {0.1: [0, 2]}
    """
    found: dict[float, list[int]] = {}
    for index, coefficient in enumerate(coefficients):
        if coefficient:
            found.setdefault(coefficient, []).append(index)
    return found
