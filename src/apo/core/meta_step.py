r"""One meta-step of Algorithm 1, without unrolling a graph.

With :math:`\theta'(\phi) = \theta + \Delta(\phi)`, the meta-gradient is the pull-back of one ordinary gradient,

.. math::
    \nabla_\phi Q = \Big(\frac{\partial \Delta}{\partial \phi}\Big)^{\!\top} h, \qquad
    h = \nabla_{\theta'} Q(\theta'),

so a meta-step asks the rule for :math:`\Delta`, has :math:`h` evaluated (:mod:`apo.core.look_ahead`), hands it to the
rule, and lets the step be taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from apo.core.batches import FSDBatches
from apo.core.look_ahead import LookAheads
from apo.core.objective import ProximalObjective
from apo.core.records import MetaStep
from apo.distributed import Processes
from apo.errors import NonFiniteError
from apo.passes.graphs import GraphedNetwork
from apo.passes.isolation import RandomState, Surface
from apo.passes.recording import Recording
from apo.rules.base import Rule
from apo.vectors import assign_, norm

__all__ = ["Engine"]

#: Largest relative difference of phi between processes, which on equal machines is zero.
_DRIFT = 1e-5


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
        look_aheads = self._look_aheads(step, parameters, origin, recordings, processes)
        rule.agree = processes.agree
        if first:
            rule.first_look(proposal, lambda displacement: look_aheads.look(displacement).gradient)
        ahead = look_aheads.look(proposal.displacement())
        gradients = proposal.pull_back(ahead.gradient)
        step_norm = proposal.step_norm()
        terms = (look_aheads.loss_at_theta(), ahead.loss, ahead.fsd, ahead.wsd, norm(gradients))
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

    def _look_aheads(
        self,
        step: int,
        parameters: list[Tensor],
        origin: list[Tensor],
        recordings: Sequence[Recording],
        processes: Processes,
    ) -> LookAheads:
        """Gather what the look-aheads of this step have in common, and draw B'."""
        for recording in recordings:
            recording.check_unchanged()
        surface = self._surface()
        surface.draws_from_host = any(recording.draws_from_host for recording in recordings)
        others: list[Recording] = []
        if self.objective.needs_other_batch and not self.batches.is_same:
            others = [self._drawn(recordings[-1], surface)]
        share = self.objective.share(step)
        if share:
            others = [replace(other, weight=_total_weight(recordings)) for other in others]
        return LookAheads(
            model=self.model,
            network=self._network_for(recordings, processes),
            criterion=self.criterion,
            objective=self.objective,
            surface=surface,
            parameters=parameters,
            origin=origin,
            decay=self.rule.coupled_weight_decay(),
            batches=list(recordings),
            others=others,
            share=share,
            scale=self._scale(),
        )

    def _network_for(self, recordings: Sequence[Recording], processes: Processes) -> nn.Module:
        """Return what stands for the network: graphs, where they are wanted and can do what the network does."""
        once = all(len(recording.calls) == 1 for recording in recordings)  # they keep the activations of one call
        # Replayed passes would not average their gradients over the processes.
        return self._graphed if self._graphed is not None and once and not processes.groups else self.model

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


def _total_weight(recordings: Sequence[Recording]) -> float | Tensor:
    """Return the factor with which training takes a batch as a whole: 1 for the mean of micro-batches.

    The elements of a loss without reduction have one each; their mean goes with a batch of any size.
    """
    return sum(r.weight.mean() if isinstance(r.weight, Tensor) else r.weight for r in recordings)


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
