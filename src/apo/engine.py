r"""One meta-step of Algorithm 1, without unrolling a graph.

With :math:`\theta'(\phi) = \theta + \Delta(\phi)`, the meta-gradient is the pull-back of one ordinary gradient,

.. math::
    \nabla_\phi Q = \Big(\frac{\partial \Delta}{\partial \phi}\Big)^{\!\top} h, \qquad
    h = \nabla_{\theta'} Q(\theta'),

so a meta-step puts :math:`\theta'` into the parameters, runs an ordinary forward and backward pass of the loss and of
the function-space term there, and hands :math:`h` to the rule. That is what training does anyway, so it works with any
module, with autocast, checkpointing, compilation or data parallelism. This is the only code that runs backward passes
and the only code that puts look-ahead weights into the network.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from apo.errors import MissingBatchError, NonFiniteError, ReplayError
from apo.fsd_batches import FSDBatches
from apo.graphed_network import GraphedNetwork
from apo.isolation import RandomState, Surface
from apo.objective import ProximalObjective, add_weight_decay_gradient_, weight_decay_value
from apo.processes import Processes, fold_up
from apo.records import MetaStep
from apo.replay import Recording
from apo.rules.base import Rule
from apo.vectors import advance_, assign_, norm, wide

__all__ = ["Engine"]

#: Largest relative difference of phi between processes, which on equal machines is zero.
_DRIFT = 1e-5


@dataclass(frozen=True)
class _LookAhead:
    """The terms of Q at a look-ahead, and its gradient h there."""

    loss: Tensor
    fsd: Tensor
    wsd: Tensor
    gradient: list[Tensor]


@dataclass
class _Surroundings:
    """What stays the same while look-aheads from one theta are evaluated."""

    network: nn.Module  # what runs in the passes
    surface: Surface  # what they may touch
    parameters: list[Tensor]
    origin: list[Tensor]  # theta
    decay: list[float]  # coupled weight decay of each parameter
    batches: list[Recording]  # B
    others: list[Recording]  # B', if it is not B
    share: float  # of the loss term on B'
    scale: float  # of a GradScaler
    at_theta: list[tuple[Any, Tensor | None]] | None = None  # predictions and losses on B', once they were asked for


@dataclass(frozen=True)
class _Part:
    """What one batch contributes to Q."""

    batch: Recording
    loss_weight: float
    fsd_weight: float
    old: Any  # the predictions at theta


class Engine:
    """Evaluates look-aheads of a rule and moves its meta-parameters.

    Args:
        model: The network.
        criterion: The loss function, or None if the network returns its loss.
        rule: What is learned.
        objective: The meta-objective.
        batches: Where the batch of the function-space term comes from.
        scaler: The ``GradScaler`` of a float16 run, so that look-ahead gradients are scaled as well.
        cuda_graph: Whether the network's passes are captured as CUDA graphs and replayed.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Callable | None,
        rule: Rule,
        objective: ProximalObjective,
        batches: FSDBatches,
        scaler: Any = None,
        cuda_graph: bool = False,
    ) -> None:
        self.model = model
        self._graphed = GraphedNetwork(model) if cuda_graph else None
        self.criterion = criterion
        self.rule = rule
        self.objective = objective
        self.batches = batches
        self.scaler = scaler

    def meta_step(
        self, step: int, theta: Mapping[Tensor, Tensor], recordings: Sequence[Recording], first: bool
    ) -> MetaStep | None:
        """Finish a training step on which phi is learned; the optimizer has just stepped from ``theta``.

        Args:
            step: Index of the training step.
            theta: The weights before the step, by parameter.
            recordings: The forward passes whose gradients the optimizer used.
            first: Whether no weight has moved yet.

        Returns:
            The record of the meta-step, or None if no parameter has a gradient.

        Raises:
            NonFiniteError: The loss is not finite, or the step would make the weights so. The weights are as before.
        """
        rule = self.rule
        parameters = rule.moved()
        _check_dense(parameters)
        proposal = rule.propose(theta)
        if not parameters:
            return None
        origin = [theta[p] for p in parameters]
        assign_(parameters, origin)
        processes = Processes.of(self.model, parameters)
        around = self._surroundings(step, parameters, origin, recordings, processes)
        rule.agree = processes.agree
        if first:
            rule.first_look(proposal, lambda displacement: self._look(displacement, around).gradient)
        ahead = self._look(proposal.displacement(), around)
        gradients = proposal.pull_back(ahead.gradient)
        step_norm = proposal.step_norm()
        terms = (self._loss_term_at_theta(around), ahead.loss, ahead.fsd, ahead.wsd, norm(gradients))
        terms = terms if step_norm is None else (step_norm, *terms)
        *norms, loss, look_ahead_loss, fsd, wsd, meta_gradient_norm = self._agree_on_terms(step, terms, processes)
        _check_loss(step, loss)
        self._check_finite(step, *norms)
        objective = look_ahead_loss + self.objective.fsd_weight * fsd + self.objective.wsd_weight * wsd
        updated = math.isfinite(meta_gradient_norm)
        if updated:
            rule.meta_update(gradients)
        rule.judge(loss, objective)
        proposal.take_step()
        if step_norm is None:
            try:
                self._check_finite(step, *_to_floats(norm(parameters)))
            except NonFiniteError:
                assign_(parameters, origin)
                raise
        return MetaStep(
            step,
            loss,
            look_ahead_loss,
            fsd,
            wsd,
            objective,
            meta_gradient_norm,
            rule.rates(),
            updated,
            rule.summary(),
        )

    def _agree_on_terms(self, step: int, terms: Sequence[Tensor], processes: Processes) -> list[float]:
        """Bring the terms of Q and the norm of the meta-gradient to the host, averaged over all processes.

        Where every process has the same phi, that is checked on the way.
        """
        if not processes.groups:
            return _to_floats(*terms)
        split = self.rule.split
        fingerprint = terms[-1].new_zeros(()) if split else norm(self.rule.phi())
        rows = processes.gather(_stack(*terms, fingerprint)).tolist()
        *columns, norms, fingerprints = zip(*rows, strict=True)
        _check_same_phi(step, fingerprints)
        means = [sum(column) / len(column) for column in columns]
        return [*means, math.sqrt(sum(n * n for n in norms)) if split else sum(norms) / len(norms)]

    def _surroundings(
        self,
        step: int,
        parameters: list[Tensor],
        origin: list[Tensor],
        recordings: Sequence[Recording],
        processes: Processes,
    ) -> _Surroundings:
        for recording in recordings:
            recording.check_unchanged()
        surface = self._surface()
        surface.draws_from_host = any(recording.draws_from_host for recording in recordings)
        decay = self.rule.coupled_weight_decay()
        others: list[Recording] = []
        if self.objective.needs_other_batch and not self.batches.is_same:
            others = [self._drawn(recordings[-1], surface)]
        share = self.objective.share(step)
        if share:
            others = [replace(other, weight=_total_weight(recordings)) for other in others]
        network, scale = self._network_for(recordings, processes), self._scale()
        return _Surroundings(network, surface, parameters, origin, decay, list(recordings), others, share, scale)

    def _network_for(self, recordings: Sequence[Recording], processes: Processes) -> nn.Module:
        """Return what stands for the network: graphs, where they are wanted and can do what the network does."""
        once = all(len(recording.calls) == 1 for recording in recordings)  # they keep the activations of one call
        # Replayed passes would not average their gradients over the processes.
        return self._graphed if self._graphed is not None and once and not processes.groups else self.model

    def _look(self, displacement: Sequence[Tensor], around: _Surroundings) -> _LookAhead:
        """Evaluate Q and its gradient at theta + displacement, and come back to theta.

        The two batches are back-propagated one after the other, so that only one graph is alive at a time.
        """
        parameters = around.parameters
        losses, discrepancies = [], []
        try:
            with around.surface.undisturbed(), torch.enable_grad():
                old_predictions = self._old_predictions(around)  # the weights are still at theta
                advance_(parameters, displacement, 1.0)
                fold_up(self.model.modules())
                for part in self._parts(around, old_predictions):
                    total = self._evaluated(around.network, part, losses, discrepancies)
                    if total is not None:
                        _times(total, around.scale).backward()
                gradient = [_gradient(p, around.scale) for p in parameters]
            if any(around.decay):
                losses.append(weight_decay_value(parameters, around.decay))
                add_weight_decay_gradient_(gradient, parameters, around.decay)
        finally:
            assign_(parameters, around.origin)
            fold_up(self.model.modules())
        if self.objective.wsd_weight:
            advance_(gradient, displacement, self.objective.wsd_weight)
        wsd = 0.5 * norm(displacement).square()
        return _LookAhead(_sum(losses, wsd), _sum(discrepancies, wsd), wsd, gradient)

    def _old_predictions(self, around: _Surroundings) -> list[Any]:
        """Return the predictions at theta on B'; if that is B, training has made them."""
        if self.batches.is_same:
            return [recording.prediction for recording in around.batches]
        if around.at_theta is None:
            with torch.no_grad(), _explained():
                around.at_theta = [other.evaluate(around.network, self.criterion) for other in around.others]
            self._check_targets(around.at_theta)
        return [prediction for prediction, _ in around.at_theta]

    def _loss_term_at_theta(self, around: _Surroundings) -> Tensor:
        """Return what Q is at theta itself, where nothing has moved: the yardstick for a look-ahead."""
        share, loss = around.share, _training_loss(around.batches)
        if share and not self.batches.is_same:
            pairs = zip(around.others, around.at_theta or (), strict=True)
            others = [_weighted(loss, other.weight) for other, (_, loss) in pairs if loss is not None]
            loss = (1.0 - share) * loss + share * _sum(others)
        return loss + weight_decay_value(around.origin, around.decay)

    def _parts(self, around: _Surroundings, old: list[Any]) -> list[_Part]:
        """Say which terms of Q each batch takes part in."""
        share, fsd = around.share, self.objective.fsd_weight
        if self.batches.is_same:
            count = len(around.batches)
            pairs = zip(around.batches, old, strict=True)
            return [_Part(batch, 1.0, fsd / count, before) for batch, before in pairs]
        parts = [_Part(batch, 1.0 - share, 0.0, None) for batch in around.batches]
        return parts + [_Part(batch, share, fsd, before) for batch, before in zip(around.others, old, strict=True)]

    def _evaluated(
        self, network: nn.Module, part: _Part, losses: list[Tensor], discrepancies: list[Tensor]
    ) -> Tensor | None:
        """Run the network on one batch and return its part of Q; note the terms."""
        if not (part.loss_weight or part.fsd_weight):
            return None
        new, loss = part.batch.evaluate(network, self.criterion)
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

    def _drawn(self, current: Recording, surface: Surface) -> Recording:
        """Draw B'; it sees the same dropout masks at theta and at theta'."""
        random_state = RandomState.capture(surface.devices, surface.draws_from_host)
        return self.batches.draw(current).with_random_state(random_state)

    def _scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler is not None and self.scaler.is_enabled() else 1.0

    def _surface(self) -> Surface:
        modules = [module for module in (self.model, self.criterion) if isinstance(module, nn.Module)]
        return Surface(modules, [p for group in self.rule.optimizer.param_groups for p in group["params"]])

    def _check_finite(self, step: int, *norms: float) -> None:
        if not all(math.isfinite(value) for value in norms):
            raise NonFiniteError(
                f"step {step} would make the weights infinite or NaN at learning rate {self.rule.rates()}, "
                "so they were left as before: clip the gradients, or lower the optimizer's lr if warm_start is off "
                "(to go on from here, load a checkpoint: the optimizer's own state has taken the gradient in)"
            )


def _check_dense(parameters: Sequence[Tensor]) -> None:
    if any(p.grad is not None and p.grad.layout != torch.strided for p in parameters):
        raise TypeError(
            "a parameter has a sparse gradient, which apo cannot learn from: build its layer with sparse=False"
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


def _training_loss(recordings: Sequence[Recording]) -> Tensor:
    """Return the loss whose gradient the optimizer used, at the weights before the step."""
    return _sum([_weighted(r.loss, r.weight) for r in recordings if r.loss is not None])


def _total_weight(recordings: Sequence[Recording]) -> float | Tensor:
    """Return the factor with which training takes a batch as a whole: 1 for the mean of micro-batches.

    The elements of a loss without reduction have one each; their mean goes with a batch of any size.
    """
    return sum(r.weight.mean() if isinstance(r.weight, Tensor) else r.weight for r in recordings)


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


def _check_loss(step: int, loss: float) -> None:
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"the training loss is {loss} at step {step}, so there is nothing to learn from: look for NaN in the data, "
            "and lower the optimizer's lr or clip the gradients if it grew before"
        )


def _check_same_phi(step: int, fingerprints: Sequence[float]) -> None:
    spread = max(fingerprints) - min(fingerprints)
    if spread > _DRIFT * max(abs(value) for value in fingerprints):
        raise RuntimeError(
            f"the meta-parameters differ between the processes at step {step} (norms {sorted(set(fingerprints))}): "
            "give all of them the same options and the same checkpoint"
        )


def _to_floats(*tensors: Tensor) -> list[float]:
    """Bring several 0-dimensional tensors to the host, waiting for the device once."""
    return _stack(*tensors).tolist()


def _stack(*tensors: Tensor) -> Tensor:
    # In double where one of them is: not every device has it.
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    return torch.stack([tensor.detach().to(tensors[0].device, dtype) for tensor in tensors])
