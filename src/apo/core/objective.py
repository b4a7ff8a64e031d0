r"""The proximal meta-objective Q, equation (8) of the paper, and what it becomes over the course of training.

.. math::
    Q(\phi) = J_B(\theta'(\phi))
        + \frac{\lambda_{FSD}}{|B'|} \sum_{x \in B'} \rho(f(x, \theta'(\phi)), f(x, \theta))
        + \frac{\lambda_{WSD}}{2} \|\theta'(\phi) - \theta\|^2

**The other batch.** A share :math:`\alpha` of the loss term may be taken on the other batch,
:math:`(1 - \alpha) J_B + \alpha J_{B'}`. B cannot see that a part of its gradient is noise; B' sees only what the
batches have in common. Where gradients are mostly noise the learned rate falls to :math:`1 - \alpha` of what B alone
would give, where they agree it stays. With :math:`\alpha = 1` short-horizon bias makes the rate collapse, which is the
ablation of the paper's appendix D.

**The end of training.** The loss on B' is greedy: it trades progress that later steps would have made for a lower loss
after this one. For the last step of all the greedy choice is right, because nothing comes after it. So, where the
number of steps T is known, the share rises over the second half of training from its usual value to 1,

.. math::
    \alpha_t = \alpha + (1 - \alpha) \max(0, 2 t / T - 1),

and a preconditioner or a learned rate falls as far as the noise of the gradients demands. In a short run that is not
far enough, so a rule that learns a rate multiplies it by a factor that falls linearly from 1 to 0 over the same steps
(:meth:`ProximalObjective.fade`); a scheduler of the user's takes its place. In a long run both together are too much,
so the share stays as it is for a rule that compares the batches (:attr:`apo.rules.base.Rule.compares`), and the rate
rests (:mod:`apo.rules.cadence`). The paper has nothing of the kind.

**The unit of the loss.** A loop may back-propagate a small multiple of its criterion. Both weights are meant for the
criterion itself, so they shrink with it: a loss times 0.001 then learns the same steps as the loss.

**Weight decay.** Coupled decay (an L2 penalty that the optimizer adds to the gradient) is part of the loss that the
optimizer minimises, so it belongs to :math:`J_B`; decoupled decay is part of the step and needs no term.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from apo.arguments import whole_number
from apo.discrepancy import Bregman, CategoricalKL, Discrepancy, for_loss
from apo.discrepancy.base import select_output
from apo.passes.recording import Recording
from apo.vectors import advance_, norm, widened

__all__ = ["ProximalObjective", "Terms"]

#: The part of training after which the end counts as near.
_END_IS_NEAR = 0.5
#: The smallest factor of a learned rate at the end of training.
_LEAST_FADE = 0.01

#: A run of fewer steps is short: a warm-up of the usual length would take too much of it. And the largest pace.
_SHORT, _FASTEST = 500, 5.0

#: Weights of micro-batches that add up to more than this are a mean, but for rounding.
_FULL_WEIGHT = 0.99


class Terms(NamedTuple):
    """The terms of Q at one point, each before its weight: tensors on the device, or numbers once they are read.

    A new term is a field here, its gradient in :mod:`apo.core.look_ahead` and a field of the record.
    """

    loss: Any
    fsd: Any
    wsd: Any

    def total(self, objective: ProximalObjective, unit: float = 1.0) -> Any:
        """Return Q for a loss in this unit, see :func:`unit_of_loss`."""
        return self.loss + unit * (objective.fsd_weight * self.fsd + objective.wsd_weight * self.wsd)


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
        total_steps: T, how many steps of the optimizer training takes; None if nobody knows.
        share_is_default: Whether nobody asked for that share: then it is dropped where it cannot be had.

    Example:
        >>> import torch.nn.functional as F
        >>> objective = ProximalObjective(0.3, 0.0, criterion=F.cross_entropy, total_steps=1000)
        >>> type(objective.discrepancy).__name__
        'CategoricalKL'
        >>> [objective.nearness(step) for step in (0, 500, 750, 1000)]
        [0.0, 0.0, 0.5, 1.0]
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
        share_is_default: bool = False,
    ) -> None:
        self.fsd_weight = _weight("fsd_weight", fsd_weight)
        self.wsd_weight = _weight("wsd_weight", wsd_weight)
        self.other_batch_share = _weight("other_batch_share", other_batch_share)
        if other_batch_share > 1:
            raise ValueError(f"other_batch_share must be from 0 to 1, got {other_batch_share}: 0 is the paper's")
        self.share_is_default = share_is_default
        advice = "the batches of an epoch times the epochs, divided by the micro-batches of a step if there are more"
        self.total_steps = None if total_steps is None else whole_number("total_steps", total_steps, advice)
        self._wanted = (discrepancy, criterion)
        self.discrepancy = _discrepancy(*self._wanted) if self.fsd_weight > 0 else None
        self._ignore_index = _ignore_index(criterion)
        if not (mask is None or mask == "auto" or callable(mask)):
            raise TypeError(f"mask must be 'auto', None or a function of a batch's recording, got {mask!r}")
        self._mask = mask

    @property
    def has_scale_of_loss(self) -> bool:
        """Whether the discrepancy was derived from the loss function, so that a factor in that is one in both."""
        choice, criterion = self._wanted
        return isinstance(choice, Bregman) or (choice == "auto" and criterion is not None)

    @property
    def needs_other_batch(self) -> bool:
        """Whether a batch B' beside B takes part."""
        return self.fsd_weight > 0 or self.needs_other_targets

    @property
    def needs_other_targets(self) -> bool:
        """Whether a loss is taken on B', now or towards the end of training."""
        return self.other_batch_share > 0 or self.total_steps is not None

    @property
    def pace(self) -> float:
        r"""How many times faster than usual a rate may rise at first: :math:`\sqrt{500/T}` in a run of T < 500 steps.

        The root is a compromise. In proportion to 1/T the warm-up would always take the same part of a run, but
        look-aheads are as noisy as ever.
        """
        return 1.0 if self.total_steps is None else min(max(math.sqrt(_SHORT / self.total_steps), 1.0), _FASTEST)

    def nearness(self, step: int) -> float:
        """Return how near the end of training is: 0 in the first half, then rising to 1, and 1 beyond the end."""
        if self.total_steps is None:
            return 0.0
        return min(max((step / self.total_steps - _END_IS_NEAR) / (1.0 - _END_IS_NEAR), 0.0), 1.0)

    def share(self, step: int, comparable: bool = True, compares: bool = False) -> float:
        r"""Return :math:`\alpha` at a step, counted from 0: it rises when the end of training is near.

        Args:
            step: The step.
            comparable: Whether B' says the same kind of thing as B; if not, a default share is dropped.
            compares: Whether the rule compares the batches: then the share does not rise.
        """
        nearness = 0.0 if compares and comparable else self.nearness(step)
        usual = self.other_batch_share if comparable or not self.share_is_default else 0.0
        return usual + (1.0 - usual) * nearness

    def fade(self, step: int) -> float:
        """Return the factor of a learned rate at a step, counted from 0: it falls at the end of training.

        It does not fall to 0 itself: a training that continues should do so slowly, and say so, not stand still.
        """
        return max(1.0 - self.nearness(step), _LEAST_FADE)

    def warnings(self, step: int) -> list[str]:
        """Return what the user should know after a step."""
        if self.total_steps is None or step < self.total_steps:
            return []
        return [
            f"training continues after total_steps={self.total_steps}, where the rate has fallen: pass the "
            "number of steps that training really takes"
        ]

    def fsd(self, new: Any, old: Any, recording: Recording) -> Tensor:
        r"""Return the mean of :math:`\rho(new, old)` over the positions of the batch that count."""
        assert self.discrepancy is not None
        criterion, rho = self._wanted[1], self.discrepancy
        # The criterion leaves padding out by itself.
        as_in_training = recording.loss_args is not None and not callable(self._mask)
        if as_in_training and criterion is not None and isinstance(rho, Bregman) and rho.is_of(criterion):
            return rho.of_loss(functools.partial(recording.loss_of, criterion), new, old)
        mask = self._padding(recording, new) if self._mask == "auto" else None
        if callable(self._mask):
            mask = self._mask(recording)
        return self.discrepancy(new, old, mask=mask, target=recording.target)

    def sampled_loss(self, outputs: Any, generator: torch.Generator) -> Tensor:
        """Return a loss at targets drawn from the outputs, see :meth:`apo.Discrepancy.sampled_loss`."""
        return (self.discrepancy or _discrepancy(*self._wanted)).sampled_loss(outputs, generator)

    def _padding(self, recording: Recording, new: Any) -> Tensor | None:
        """Find the mask that the batch itself carries, if its shape fits the outputs."""
        logits = select_output(new, None)
        if not isinstance(logits, Tensor):
            return None
        target, ignored = recording.target, recording.loss_kwargs.get("ignore_index", self._ignore_index)
        labelled = ignored is not None and isinstance(target, Tensor) and not target.is_floating_point()
        if labelled and target.numel() * logits.shape[1] == logits.numel():
            counted = target != ignored
            # On the CPU, to find that all count is cheaper than to leave nothing out; elsewhere it would wait.
            return None if counted.is_cpu and counted.all() else counted
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


def unit_of_loss(weights: Sequence[float | Tensor]) -> float | Tensor:
    """Return the multiple of the criterion that was back-propagated, from the weights of its losses; at most 1.

    The sum of several losses is no larger unit: each has its own term in Q. A tensor is not read.

    Example:
        >>> unit_of_loss([0.25] * 4), unit_of_loss([1.0, 1.0]), unit_of_loss([-0.001])
        (1.0, 1.0, 0.001)
    """
    total = sum(weight.abs().sum() if isinstance(weight, Tensor) else abs(weight) for weight in weights)
    if isinstance(total, Tensor):
        return torch.where((total > 0) & (total < _FULL_WEIGHT), total, 1.0)
    return total if 0 < total < _FULL_WEIGHT else 1.0


def weight_decay_value(parameters: list[Tensor], coefficients: list[float]) -> Tensor | float:
    """Return the sum of ``coefficient / 2 * ||parameter||^2``: coupled decay as a part of the loss."""
    value: Tensor | float = 0.0
    for decay, indices in _by_coefficient(coefficients).items():
        value = value + 0.5 * decay * norm([parameters[i].detach() for i in indices]).square()
    return value


def add_weight_decay_gradient_(gradient: list[Tensor], parameters: list[Tensor], coefficients: list[float]) -> None:
    """Add the gradient of :func:`weight_decay_value` in place."""
    for decay, indices in _by_coefficient(coefficients).items():
        advance_([gradient[i] for i in indices], widened([parameters[i].detach() for i in indices]), decay)


def _by_coefficient(coefficients: list[float]) -> dict[float, list[int]]:
    """Return which parameters share a coefficient, for those that have one: usually all of them.

    Example:
        >>> _by_coefficient([0.1, 0.0, 0.1])
        {0.1: [0, 2]}
    """
    found: dict[float, list[int]] = {}
    for index, coefficient in enumerate(coefficients):
        if coefficient:
            found.setdefault(coefficient, []).append(index)
    return found
