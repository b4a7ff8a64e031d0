r"""Looking ahead: Q and its gradient at other weights than those in force, without unrolling a graph.

With :math:`\theta' = \theta + \Delta`, all that a meta-step needs of the network is Q, equation (8), at
:math:`\theta'` and

.. math::
    h = \nabla_{\theta'} Q(\theta').

So :math:`\theta'` is put into the parameters, and an ordinary forward and backward pass of the loss and of the
function-space term is run there. Training does the same at every step, so it works with any module, with autocast,
checkpointing, compilation or data parallelism. This is the only code that runs backward passes and the only code that
puts look-ahead weights into the network.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apo.core.objective import ProximalObjective, Terms, add_weight_decay_gradient_, weight_decay_value
from apo.distributed import Processes, are_several, fold_up
from apo.errors import MissingBatchError, NonFiniteError, ReplayError
from apo.passes.isolation import Surface
from apo.passes.recording import Recording, tree_map
from apo.rules.base import Comparison
from apo.rules.return_point import ReturnPoint
from apo.vectors import advance_, assign_, dot, norm, scaled, widened

__all__ = ["LookAhead", "LookAheads"]

#: The smallest share of the loss term from which a batch's own slope and loss can be recovered.
_LEAST_SHARE = 0.04
#: More than any number of processes.
_PROCESSES = 1_000_003


class LookAhead(NamedTuple):
    """The terms of Q at a look-ahead, its gradient h there, and what each batch says (tensors, not yet read)."""

    terms: Terms
    gradient: list[Tensor]
    comparison: Comparison | None = None


class _Part(NamedTuple):
    """What one batch contributes to Q."""

    batch: Recording
    loss_weight: float
    fsd_weight: float
    old: Any  # the predictions at theta


@dataclass
class LookAheads:
    """Evaluates look-aheads from one theta."""

    network: nn.Module  # what runs in the passes: the network itself, or its CUDA graphs
    criterion: Callable | None  # None if the network returns its loss
    objective: ProximalObjective
    surface: Surface  # what the passes may touch
    parameters: list[Tensor]  # what moves; theta is in them
    origin: list[Tensor]  # a copy of theta
    decay: list[float]  # coupled weight decay of each parameter
    batches: list[Recording]  # B
    other: list[Recording]  # the losses that make up that of B' together; none if it is B, or if no term needs it
    other_fsd: list[float]  # the factor of each of them in the function-space term
    share: float  # of the loss term on B'
    scale: float  # the factor of a GradScaler
    unit: float | Tensor  # of the loss, see `apo.core.objective.unit_of_loss`
    processes: Processes
    compares: bool = False  # whether to say what B and B' contribute each
    _at_theta: tuple[list, Any] | None = field(default=None, init=False)  # predictions and loss on B', once evaluated

    def look(self, displacement: Sequence[Tensor]) -> LookAhead:
        """Evaluate Q and its gradient at theta + displacement, and come back to theta.

        The batches are back-propagated one after the other, so that only one graph is alive at a time.
        """
        wsd = 0.5 * norm(displacement).square()
        losses: list[Tensor | float] = []
        discrepancies: list[Tensor | float] = []
        comparison = own_slope = None
        with self._passes():
            parts = self._parts()  # with the predictions at theta, where the weights still are
            # Both batches need enough of a share for what they say to be told apart.
            compares = self.compares and _LEAST_SHARE < self.share < 1.0 - _LEAST_SHARE
            try:
                advance_(self.parameters, displacement, 1.0)
                self._drop_assembled_weights()
                for index, part in enumerate(parts):
                    total = self._evaluate(part, losses, discrepancies)
                    if total is not None:
                        _times(total, self.scale).backward()
                    if compares and self.other and index == len(self.batches) - 1:
                        own_slope = dot(self._gradient(), displacement)
                gradient = self._gradient()
                if own_slope is not None:
                    slope, fsd = dot(gradient, displacement), _sum(discrepancies, own_slope)
                    comparison = self._compare(losses, fsd, wsd, own_slope, slope - own_slope)
                if any(self.decay):
                    losses.append(weight_decay_value(self.parameters, self.decay))
                    add_weight_decay_gradient_(gradient, self.parameters, self.decay)
            finally:
                assign_(self.parameters, self.origin)
        if self.objective.wsd_weight:
            in_unit = scaled(displacement, self.unit) if isinstance(self.unit, Tensor) else displacement
            number = 1.0 if isinstance(self.unit, Tensor) else self.unit
            advance_(gradient, in_unit, number * self.objective.wsd_weight)
        return LookAhead(Terms(_sum(losses, wsd), _sum(discrepancies, wsd), wsd), gradient, comparison)

    def sampled_gradient(self, step: int) -> list[Tensor]:
        """Return the gradient at theta of the loss on the first pass of B, at targets drawn from the outputs.

        Seeds differ between steps and processes, so that resuming needs no state of a random stream.
        """
        rank = dist.get_rank() if are_several() else 0
        generator = torch.Generator().manual_seed(step * _PROCESSES + rank)
        with self._passes():
            outputs, _ = self.batches[0].evaluate(self.network, self.criterion)
            _times(self.objective.sampled_loss(outputs, generator), self.scale).backward()
            return self._gradient()

    def gradient_at_theta(self) -> list[Tensor]:
        """Return the gradient of the loss on B at theta, without weight decay: training's, if apo sees all of it."""
        with self._passes():
            for batch in self.batches:
                _, loss = batch.evaluate(self.network, self.criterion)
                assert loss is not None
                _times(_weighted(loss, batch.weight), self.scale).backward()
            return self._gradient()

    def setback(self, point: ReturnPoint) -> float:
        """Return by how much the loss on B is higher at theta than at the weights of a return point."""
        with self._passes(), point.in_force(dict(zip(self.parameters, self.origin, strict=True))):
            self._drop_assembled_weights()
            losses = [(self._without_graph(batch)[1], batch.weight) for batch in self.batches]
        earlier = _sum([_weighted(loss, weight) for loss, weight in losses if loss is not None])
        return self.processes.agree(self._own_loss_at_theta() - earlier)  # type: ignore[operator]

    def loss_at_theta(self) -> Tensor:
        """Return Q at theta itself, where nothing has moved: what a look-ahead has to lower."""
        loss = self._own_loss_at_theta()
        if self.share and self.other:
            loss = (1.0 - self.share) * loss + self.share * self._other_at_theta()[1]
        return loss + weight_decay_value(self.origin, self.decay) if any(self.decay) else loss

    def _own_loss_at_theta(self) -> Tensor:
        return _sum([_weighted(r.loss, r.weight) for r in self.batches if r.loss is not None])

    def _compare(
        self, losses: Sequence[Tensor | float], fsd: Tensor, wsd: Tensor, own_slope: Tensor, other_slope: Tensor
    ) -> Comparison:
        r"""Return promise and price on both batches, from losses and slopes at both ends of the look-ahead.

        With :math:`d = \langle\nabla J(\theta'), \Delta\rangle`, a quadratic J has :math:`a = d - 2 (J' - J)` and
        :math:`c = 2 (d - (J' - J))`. FSD and WSD are quadratic in the look-ahead: slope and price are twice the value.
        """
        own, other = losses[: len(self.batches)], losses[len(self.batches) :]
        price = fsd_price = 2.0 * self.objective.fsd_weight * _times(fsd, self.unit)
        if self.objective.wsd_weight:
            price = price + 2.0 * self.objective.wsd_weight * _times(wsd, self.unit)
        own_slope = own_slope / (1.0 - self.share)
        other_slope = (other_slope - fsd_price) / self.share
        own_change = _sum(own) / (1.0 - self.share) - self._own_loss_at_theta()
        other_change = _sum(other) / self.share - self._other_at_theta()[1]
        return Comparison(
            torch.sub(own_slope, own_change, alpha=2.0),  # type: ignore[arg-type]
            2.0 * (own_slope - own_change),  # type: ignore[arg-type]
            torch.sub(other_slope, other_change, alpha=2.0),  # type: ignore[arg-type]
            2.0 * (other_slope - other_change),  # type: ignore[arg-type]
            price,  # type: ignore[arg-type]
        )

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Run passes in the modes of B's pass, which the loop may have changed since, and leave no trace of them."""
        try:
            with self.surface.undisturbed(self.batches[-1].modes), torch.enable_grad():
                yield
        finally:
            self._drop_assembled_weights()

    def _gradient(self) -> list[Tensor]:
        """Return what the backward passes left in ``.grad``, without the factor of a GradScaler."""
        found = widened([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        return found if self.scale == 1.0 else [gradient / self.scale for gradient in found]

    def _drop_assembled_weights(self) -> None:
        if self.processes.groups:  # under fully_shard, modules may still hold weights from before the move
            fold_up(self.network.modules())

    def _parts(self) -> list[_Part]:
        """Return what each batch contributes. If B' is B, training has already made the predictions at theta."""
        self.batches = [batch if batch.loss is not None else self._measured(batch) for batch in self.batches]
        fsd = self.objective.fsd_weight
        if not self.other:
            return [_Part(batch, 1.0, fsd / len(self.batches), batch.prediction) for batch in self.batches]
        predictions, _ = self._other_at_theta()  # first: it may find that B' has no targets
        own = [_Part(batch, 1.0 - self.share, 0.0, None) for batch in self.batches]
        others = zip(self.other, self.other_fsd, predictions, strict=True)
        return own + [_Part(batch, self.share, fsd * factor, old) for batch, factor, old in others]

    def _measured(self, batch: Recording) -> Recording:
        """Return a batch of B with prediction and loss at theta, which the training pass has seen at other weights."""
        prediction, loss = self._without_graph(batch)
        return replace(batch, prediction=prediction, loss=loss)

    def _other_at_theta(self) -> tuple[list, Any]:
        """Return predictions and loss (or None) on B' at theta; the first look-ahead evaluates them."""
        if self._at_theta is None:
            with _run_again():
                predictions, values = zip(*map(self._without_graph, self.other), strict=True)
            weighted = [_weighted(v, b.weight) for v, b in zip(values, self.other, strict=True) if v is not None]
            loss = _sum(weighted) if len(weighted) == len(self.other) else None
            self._at_theta = list(predictions), loss
            # Checked at the first meta-step, even if the loss on B' is needed only towards the end of training.
            if loss is None and self.objective.needs_other_targets:
                self.share = 0.0
                if not self.objective.share_is_default or self.objective.total_steps is not None:
                    raise MissingBatchError(
                        "the loss term was asked for on another batch, but that batch has no targets: let fsd_batch "
                        "yield (inputs, target) pairs"
                    )
        return self._at_theta

    def _without_graph(self, batch: Recording) -> tuple[Any, Tensor | None]:
        """Return prediction and loss on a batch as constants."""
        try:
            with torch.no_grad():
                return batch.evaluate(self.network, self.criterion)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
        # The network, or the loop before the criterion, differentiates: forces from an energy, for instance.
        with torch.enable_grad():
            prediction, loss = batch.evaluate(self.network, self.criterion)
        return tree_map(Tensor.detach, prediction), None if loss is None else loss.detach()

    def _evaluate(
        self, part: _Part, losses: list[Tensor | float], discrepancies: list[Tensor | float]
    ) -> Tensor | None:
        """Run the network on one batch and return its part of Q; append its terms."""
        if not (part.loss_weight or part.fsd_weight):
            return None
        new, loss = part.batch.evaluate(self.network, self.criterion)
        terms = []
        if part.loss_weight:
            assert loss is not None  # of B' as well, see `_other_at_theta`
            terms.append(_times(_weighted(loss, part.batch.weight), part.loss_weight))
            losses.append(terms[-1].detach())
        if part.fsd_weight:
            fsd = self.objective.fsd(new, part.old, part.batch)
            terms.append(_times(fsd * part.fsd_weight, self.unit))
            discrepancies.append(_times(fsd.detach(), part.fsd_weight / self.objective.fsd_weight))
        return _sum(terms)


@contextmanager
def _run_again() -> Iterator[None]:
    """Say what it means if the network or the criterion, which served in training, fails on B'."""
    try:
        yield
    except (ReplayError, MissingBatchError, NonFiniteError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        raise RuntimeError(
            f"running the network again on another batch, the previous one by default, failed with {error!r}: this "
            "happens where the path through network or criterion depends on an attribute that the loop sets (the task "
            "of a step, say), so pass that as an argument of forward or of the criterion, or pass fsd_batch='same' and "
            "leave out total_steps; if fsd_batch is an iterable, its batches must fit the network"
        ) from error


def _weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return a loss times the factor with which it was back-propagated; a loss without reduction is summed."""
    value = _times(loss, weight)
    return value.sum() if value.ndim else value


def _times(tensor: Tensor, factor: float | Tensor) -> Tensor:
    # A kernel saved, and the usual case; comparing a tensor would wait for its device.
    return tensor if not isinstance(factor, Tensor) and factor == 1.0 else tensor * factor


def _sum(terms: Sequence[Tensor | float], like: Tensor | None = None) -> Tensor:
    """Add up some terms; without any, return a zero on the device of ``like``."""
    if not terms:
        return torch.zeros_like(like)  # type: ignore[arg-type]
    return functools.reduce(operator.add, terms)  # type: ignore[return-value]
