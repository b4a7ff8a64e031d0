r"""Looking ahead: Q and its gradient at other weights than those in force, without unrolling a graph.

With :math:`\theta' = \theta + \Delta`, all that a meta-step needs of the network is Q, equation (8), at
:math:`\theta'` and

.. math::
    h = \nabla_{\theta'} Q(\theta').

So :math:`\theta'` is put into the parameters, and an ordinary forward and backward pass of the loss and of the
function-space term is run there. That is what training does anyway, so it works with any module, with autocast,
checkpointing, compilation or data parallelism. This is the only code that runs backward passes and the only code that
puts look-ahead weights into the network.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from apo.core.objective import ProximalObjective, add_weight_decay_gradient_, weight_decay_value
from apo.distributed import fold_up
from apo.errors import MissingBatchError, ReplayError
from apo.passes.isolation import Surface
from apo.passes.recording import Recording
from apo.vectors import advance_, assign_, norm, wide

__all__ = ["LookAhead", "LookAheads"]


@dataclass(frozen=True)
class LookAhead:
    """The terms of Q at a look-ahead, and its gradient h there."""

    loss: Tensor
    fsd: Tensor
    wsd: Tensor
    gradient: list[Tensor]


@dataclass(frozen=True)
class _Part:
    """What one batch contributes to Q."""

    batch: Recording
    loss_weight: float
    fsd_weight: float
    old: Any  # the predictions at theta


@dataclass
class LookAheads:
    """Evaluates look-aheads from one theta.

    Attributes:
        model: The network.
        network: What runs in the passes: the network, or what stands for it.
        criterion: The loss function, or None if the network returns its loss.
        objective: The meta-objective.
        surface: What the passes may touch.
        parameters: What moves; theta is in them.
        origin: A copy of theta.
        decay: Coupled weight decay of each parameter.
        batches: B.
        others: B'; nothing if it is B, or if no term needs it.
        share: The share of the loss term on B'.
        scale: The factor of a GradScaler.
    """

    model: nn.Module
    network: nn.Module
    criterion: Callable | None
    objective: ProximalObjective
    surface: Surface
    parameters: list[Tensor]
    origin: list[Tensor]
    decay: list[float]
    batches: list[Recording]
    others: list[Recording]
    share: float
    scale: float
    _at_theta: list[tuple[Any, Tensor | None]] | None = field(default=None, init=False)  # on B', once asked for

    def look(self, displacement: Sequence[Tensor]) -> LookAhead:
        """Evaluate Q and its gradient at theta + displacement, and come back to theta.

        The two batches are back-propagated one after the other, so that only one graph is alive at a time.
        """
        losses, discrepancies = [], []
        try:
            with self.surface.undisturbed(), torch.enable_grad():
                parts = self._parts()  # with the predictions at theta, where the weights still are
                advance_(self.parameters, displacement, 1.0)
                fold_up(self.model.modules())
                for part in parts:
                    total = self._evaluated(part, losses, discrepancies)
                    if total is not None:
                        _times(total, self.scale).backward()
                gradient = [_gradient(p, self.scale) for p in self.parameters]
            if any(self.decay):
                losses.append(weight_decay_value(self.parameters, self.decay))
                add_weight_decay_gradient_(gradient, self.parameters, self.decay)
        finally:
            assign_(self.parameters, self.origin)
            fold_up(self.model.modules())
        if self.objective.wsd_weight:
            advance_(gradient, displacement, self.objective.wsd_weight)
        wsd = 0.5 * norm(displacement).square()
        return LookAhead(_sum(losses, wsd), _sum(discrepancies, wsd), wsd, gradient)

    def loss_at_theta(self) -> Tensor:
        """Return what Q is at theta itself, where nothing has moved: the yardstick for a look-ahead."""
        loss = _sum([_weighted(r.loss, r.weight) for r in self.batches if r.loss is not None])
        if self.share and self.others:
            pairs = zip(self.others, self._others_at_theta(), strict=True)
            others = [_weighted(other_loss, other.weight) for other, (_, other_loss) in pairs if other_loss is not None]
            loss = (1.0 - self.share) * loss + self.share * _sum(others)
        return loss + weight_decay_value(self.origin, self.decay)

    def _parts(self) -> list[_Part]:
        """Say which terms of Q each batch takes part in. Where B' is B, training has made the predictions at theta."""
        fsd = self.objective.fsd_weight
        if not self.others:
            return [_Part(batch, 1.0, fsd / len(self.batches), batch.prediction) for batch in self.batches]
        own = [_Part(batch, 1.0 - self.share, 0.0, None) for batch in self.batches]
        pairs = zip(self.others, self._others_at_theta(), strict=True)
        return own + [_Part(other, self.share, fsd, prediction) for other, (prediction, _) in pairs]

    def _others_at_theta(self) -> list[tuple[Any, Tensor | None]]:
        """Return predictions and losses on B' at theta; the first call, a look-ahead's, evaluates them."""
        if self._at_theta is None:
            with torch.no_grad(), _explained():
                self._at_theta = [other.evaluate(self.network, self.criterion) for other in self.others]
            self._check_targets(self._at_theta)
        return self._at_theta

    def _evaluated(self, part: _Part, losses: list[Tensor], discrepancies: list[Tensor]) -> Tensor | None:
        """Run the network on one batch and return its part of Q; note the terms."""
        if not (part.loss_weight or part.fsd_weight):
            return None
        new, loss = part.batch.evaluate(self.network, self.criterion)
        terms = []
        if part.loss_weight:
            assert loss is not None  # of B' as well, see `_check_targets`
            terms.append(_times(_weighted(loss, part.batch.weight), part.loss_weight))
            losses.append(terms[-1].detach())
        if part.fsd_weight:
            fsd = self.objective.fsd(new, part.old, part.batch)
            terms.append(fsd * part.fsd_weight)
            discrepancies.append(_times(fsd.detach(), part.fsd_weight / self.objective.fsd_weight))
        return _sum(terms)

    def _check_targets(self, at_theta: list[tuple[Any, Tensor | None]]) -> None:
        """Refuse a B' without a loss where one is needed, at the first meta-step even if it is needed only later."""
        if self.objective.needs_other_targets and any(loss is None for _, loss in at_theta):
            raise MissingBatchError(
                "the loss term was asked for on another batch, but that batch has no targets: let fsd_batch yield "
                "(inputs, target) pairs"
            )


@contextmanager
def _explained() -> Iterator[None]:
    """Say what to do about a network that differentiates in its forward pass, where no graph is kept."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise ReplayError(
            "the network differentiates in its forward pass, so it needs a graph where apo keeps none: "
            'use fsd_batch="same"'
        ) from error


def _gradient(parameter: Tensor, scale: float) -> Tensor:
    """Return what the backward passes left in ``.grad``, without the factor of a GradScaler."""
    if parameter.grad is None:
        return torch.zeros_like(wide(parameter))
    gradient = wide(parameter.grad)
    return gradient if scale == 1.0 else gradient / scale


def _weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return a loss times the factor with which it was back-propagated; a loss without reduction is summed."""
    value = loss * weight if isinstance(weight, Tensor) else _times(loss, weight)
    return value.sum() if value.ndim else value


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1.0 else tensor * factor


def _sum(terms: Sequence[Tensor | float], like: Tensor | None = None) -> Tensor:
    """Add up what is there; nothing gives a zero on the device of ``like``."""
    if not terms:
        return torch.zeros_like(like)  # type: ignore[arg-type]
    return functools.reduce(operator.add, terms)  # type: ignore[return-value]
