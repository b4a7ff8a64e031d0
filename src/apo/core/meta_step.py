r"""One meta-step of Algorithm 1, without unrolling a graph.

With :math:`\theta'(\phi) = \theta + \Delta(\phi)`, the meta-gradient is the pull-back of one ordinary gradient,

.. math::
    \nabla_\phi Q = \Big(\frac{\partial \Delta}{\partial \phi}\Big)^{\!\top} h, \qquad
    h = \nabla_{\theta'} Q(\theta'),

so a meta-step asks the rule for :math:`\Delta`, evaluates :math:`h` (:mod:`apo.core.look_ahead`), hands it to the
rule, and lets the rule take its step. :meth:`Engine.meta_step` has these stages in order; the methods below it say what
is read, how the look-ahead went, and what becomes of a network that explodes.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apo.core.batches import FSDBatches, OtherBatch
from apo.core.look_ahead import LookAhead, LookAheads
from apo.core.mismatch import Agreement, LossScale, cosine
from apo.core.objective import ProximalObjective, Terms
from apo.core.records import MetaStep
from apo.distributed import ALONE, Processes, are_several, through_wrapper
from apo.errors import ApoWarning, NonFiniteError
from apo.passes.graphs import GraphedNetwork
from apo.passes.isolation import Surface
from apo.passes.recording import Recording
from apo.rules.base import Comparison, Outcome, Proposal, Rule, Standing
from apo.rules.newcomers import Newcomers
from apo.rules.return_point import ReturnPoint
from apo.vectors import assign_, dot, norm, zero_share

__all__ = ["Engine"]

#: What makes the weights before it scale-invariant, so that noise makes them grow.
_NORMS_OVER_IMAGES = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
#: Largest relative difference of phi between processes, which is zero on equal machines.
_DRIFT = 1e-5


class Engine:
    """Evaluates look-aheads of a rule and moves its meta-parameters.

    The criterion is None if the network returns its loss. A ``GradScaler`` scales look-ahead gradients as well.

    Attributes:
        network: What the look-ahead calls: the model, or the model through the wrapper that averages its gradients.
        newcomers: Knows of parameters that will move for the first time; such a step has to be a meta-step.
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
        self._model = model
        self.network = model
        self._graphed = GraphedNetwork(model) if cuda_graph else None
        self._normalised = any(isinstance(module, _NORMS_OVER_IMAGES) for module in model.modules())
        self.criterion = criterion
        self.rule = rule
        self.objective = objective
        self.batches = batches
        self.scaler = scaler
        self._return_point = ReturnPoint(model, rule.optimizer)
        self._agreement = Agreement()
        self._loss_scale = LossScale(objective)
        self._has_warned = False  # of a step without gradients
        self.newcomers = Newcomers(rule.optimizer)

    def find_wrapper(self) -> None:
        """Note the ``DistributedDataParallel`` through which the model is being called now, if there is one."""
        self.network = through_wrapper(self._model, self.network) if are_several() else self._model

    def note_gradients(self, step: int, parameters: Iterable[Tensor]) -> None:
        """Take notice of the gradients with which the optimizer is about to take a step on which phi is learned."""
        self._agreement.note_gradients(step, parameters)

    def meta_step(
        self,
        step: int,
        theta: Mapping[Tensor, Tensor],
        recordings: Sequence[Recording],
        first: bool,
        often: bool = False,
    ) -> MetaStep | None:
        """Finish a training step on which phi is learned; the optimizer has just stepped from ``theta``.

        Args:
            step: Index of the training step.
            theta: The weights before the step, by parameter.
            recordings: The forward passes whose gradients the optimizer used.
            first: Whether no weight has moved yet.
            often: Whether the next steps are all meta-steps.

        Returns:
            The record of the meta-step, or None if no parameter has a gradient.

        Raises:
            NonFiniteError: The loss is not finite, or the step would make the weights so. The weights are as before.
        """
        if not {p.grad.layout for p in theta if p.grad is not None} <= {torch.strided}:
            raise TypeError(
                "a parameter has a sparse gradient, which apo cannot learn from: build its layer with sparse=False"
            )
        rule, proposal = self.rule, self.rule.propose(theta)
        if not proposal.parameters:
            self._warn_of_standstill(step)
            return None
        origin = [theta[p] for p in proposal.parameters]
        assign_(proposal.parameters, origin)
        look_aheads = self._look_aheads(step, proposal, origin, recordings)
        processes = look_aheads.processes

        # Where to start, before weights move for the first time.
        slope = lambda delta: processes.agree(dot(look_aheads.look(delta).gradient, delta))  # noqa: E731
        newcomers = self.newcomers.are_waiting()
        if first:
            rule.first_look(proposal, slope, often)
        elif newcomers:
            rule.first_look(proposal, slope, newcomers=True)

        # Look ahead: Q and h at theta + Delta, and h pulled back to phi.
        ahead = look_aheads.look(proposal.displacement())
        gradients = proposal.pull_back(ahead.gradient)
        sampled = look_aheads.sampled_gradient(step) if proposal.wants_sampled_gradients else None
        tensors = self._figures(step, proposal, look_aheads, ahead)
        numbers, meta_gradient_norm = self._read(step, tensors, norm(gradients), processes)
        terms = Terms(*[numbers[name] for name in Terms._fields])
        objective = terms.total(self.objective, numbers.get("unit", look_aheads.unit))  # type: ignore[arg-type]
        outcome = self._outcome(step, numbers, objective, look_aheads)

        # phi moves, unless this step only makes sure that the rate in force does no harm to newcomers.
        updated = math.isfinite(meta_gradient_norm) and math.isfinite(outcome.loss)
        if updated and not newcomers:
            rule.meta_update(gradients, outcome) if rule.compares else rule.meta_update(gradients)
        sentences = [*self._agreement.sentences(numbers.get("agreement")), *self._loss_scale.sentences(outcome)]
        sentences += [*rule.after(outcome), *self.objective.warnings(step)]

        # The weights move from theta with the phi that is in force now.
        self._take_step(step, numbers, proposal, origin, sampled)
        self.newcomers.have_moved()
        return MetaStep(
            step=step,
            loss=numbers["loss at theta"],
            look_ahead_loss=terms.loss,
            fsd=terms.fsd,
            wsd=terms.wsd,
            objective=objective,
            meta_gradient_norm=meta_gradient_norm,
            lr=tuple(float(group["lr"]) for group in rule.optimizer.param_groups),
            updated=updated,
            summary=proposal.summary(),
            warnings=tuple(sentences),
        )

    def _warn_of_standstill(self, step: int) -> None:
        """Say once that a step without gradients moves nothing, in case that is a slip."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"step {step}: no parameter of the optimizer has a gradient, so nothing moves and nothing is learned: "
                "call loss.backward() before optimizer.step(), and look for frozen parameters and detached outputs",
                ApoWarning,
                stacklevel=2,
            )

    def _look_aheads(
        self,
        step: int,
        proposal: Proposal,
        origin: list[Tensor],
        recordings: Sequence[Recording],
    ) -> LookAheads:
        """Gather what the look-aheads of this step have in common, and draw B'."""
        parameters = proposal.parameters
        processes = Processes.of(self.network, parameters) if are_several() else ALONE
        for recording in recordings:
            for call in recording.calls:
                call.check_unchanged()
        modules = [module for module in (self.network, self.criterion) if isinstance(module, nn.Module)]
        everything = [p for group in self.rule.optimizer.param_groups for p in group["params"]]
        draws_from_host = any(recording.draws_from_host for recording in recordings)
        surface = Surface(modules, everything, draws_from_host)
        source = self.batches if self.objective.needs_other_batch else None
        other = OtherBatch(recordings, source, processes, parameters[0].device)
        # Nobody has tried to compare batches with weights in float16.
        comparable = other.is_comparable and torch.float16 not in {p.dtype for p in parameters}
        share = self.objective.share(step, comparable, self.rule.compares)
        # Graphs keep the activations of one call, and do not average gradients over processes.
        graphs_serve = self._graphed is not None and not processes.groups and {len(r.calls) for r in recordings} == {1}
        return LookAheads(
            network=self._graphed if graphs_serve else self.network,  # type: ignore[arg-type]
            criterion=self.criterion,
            objective=self.objective,
            surface=surface,
            parameters=parameters,
            origin=origin,
            decay=proposal.coupled_decay,
            batches=list(recordings),
            # B' sees the same dropout masks, and the same state in attributes, at theta and at theta'.
            other=other.losses(surface.state(), share),
            other_fsd=other.fsd_factors(),
            share=share,
            scale=float(self.scaler.get_scale()) if self.scaler is not None and self.scaler.is_enabled() else 1.0,
            unit=other.unit,
            processes=processes,
            compares=self.rule.compares and comparable,
        )

    def _figures(self, step: int, proposal: Proposal, look_aheads: LookAheads, ahead: LookAhead) -> dict[str, Tensor]:
        """Return what has to be known on the host about a look-ahead, beside the meta-gradient."""
        parameters = proposal.parameters
        figures = {"loss at theta": look_aheads.loss_at_theta(), **ahead.terms._asdict()}
        step_norm = proposal.step_norm()
        if step_norm is not None:
            figures["step norm"] = step_norm
        if ahead.comparison is not None:
            figures |= ahead.comparison._asdict()
        if self.rule.compares and self._normalised:
            figures["weights"] = norm([p for p in parameters if p.ndim > 1])
        if self._return_point.kept:
            self._return_point.expire(step)
        if self._return_point.kept:
            figures["silent"] = zero_share([p.grad for p in parameters])  # type: ignore[misc]
        if isinstance(look_aheads.unit, Tensor):
            figures["unit"] = look_aheads.unit
        if self._agreement.is_due(step):
            used = [p.grad for p in parameters]
            figures["agreement"] = cosine(used, look_aheads.gradient_at_theta())  # type: ignore[arg-type]
        return figures

    def _read(
        self, step: int, numbers: Mapping[str, Tensor], meta_gradient_norm: Tensor, processes: Processes
    ) -> tuple[dict[str, float], float]:
        """Bring all numbers to the host together, averaged over all processes, so that a device is waited for once.

        If every process has the same phi, that is checked on the way.
        """
        tensors, split = [*numbers.values(), meta_gradient_norm], self.rule.split
        if processes.groups:
            tensors.append(meta_gradient_norm.new_zeros(()) if split else norm(self.rule.phi()))
        # In double if one of them is: not every device has it.
        dtype = torch.float64 if torch.float64 in {tensor.dtype for tensor in tensors} else torch.float32
        stacked = torch.stack([tensor.to(tensors[0].device, dtype) for tensor in tensors]).detach()
        if not processes.groups:
            *values, meta = stacked.tolist()
            return dict(zip(numbers, values, strict=True)), meta
        *columns, norms, fingerprints = zip(*processes.gather(stacked).tolist(), strict=True)
        if max(fingerprints) - min(fingerprints) > _DRIFT * max(abs(value) for value in fingerprints):
            raise RuntimeError(
                f"the meta-parameters differ between the processes at step {step} (norms {sorted(set(fingerprints))}): "
                "give all of them the same options and the same checkpoint"
            )
        means = [sum(column) / len(column) for column in columns]
        # Each process has the gradient of its own part of phi, or all have the same gradient.
        meta = math.sqrt(sum(n * n for n in norms)) if split else sum(norms) / len(norms)
        return dict(zip(numbers, means, strict=True)), meta

    def _outcome(self, step: int, numbers: Mapping[str, float], objective: float, look_aheads: LookAheads) -> Outcome:
        """Describe how the look-ahead went; the loss is infinite if the weights have exploded and can go back.

        Raises:
            NonFiniteError: Loss or step are not finite, and going back would not help.
        """
        loss, point = numbers["loss at theta"], self._return_point
        # Weights that are huge or not finite can go back if their loss is not finite, and any if the loss is huge and
        # the step is not finite. Ordinary weights point at the data, or at a faulty gradient.
        if math.isfinite(loss):
            exploded = not math.isfinite(numbers.get("step norm", 0.0)) and point.is_far_below(loss)
        else:
            exploded = point.is_far_from(look_aheads.origin, look_aheads.processes.agree)
        if not exploded:
            self._check_finite(step, numbers)
        compared = Comparison._fields[0] in numbers
        return Outcome(
            step=step,
            loss=math.inf if exploded else loss,
            objective=objective,
            share=look_aheads.share,
            comparison=Comparison(*[numbers[name] for name in Comparison._fields]) if compared else None,
            weights=numbers.get("weights"),
            resolution=abs(loss) * _rounding(look_aheads),
            silent=numbers.get("silent", 0.0),
            can_go_back=bool(point.kept),
            pace=self.objective.pace,
            setback=functools.partial(look_aheads.setback, point) if point.kept else None,
        )

    def _take_step(
        self,
        step: int,
        numbers: Mapping[str, float],
        proposal: Proposal,
        origin: list[Tensor],
        sampled: list[Tensor] | None,
    ) -> None:
        """Move the weights from theta; or, if the rule holds the network for lost, put earlier ones back."""
        if self.rule.standing is Standing.BETTER:
            self._return_point.keep(step, numbers["loss at theta"])
        if self.rule.standing is Standing.LOST and self._return_point.go_back():
            return
        self._check_finite(step, numbers)
        proposal.take_step()
        if sampled is not None:
            proposal.observe_sampled(sampled)
        if "step norm" not in numbers and not math.isfinite(norm(proposal.parameters).item()):
            assign_(proposal.parameters, origin)
            self._check_finite(step, {**numbers, "step norm": math.nan})

    def _check_finite(self, step: int, numbers: Mapping[str, float]) -> None:
        """Raise unless loss and size of a step are finite."""
        loss, size = numbers["loss at theta"], numbers.get("step norm", 0.0)
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"the training loss is {loss} at step {step}, so there is nothing to learn from: look for NaN in the "
                "data, and lower the optimizer's lr or clip the gradients if it grew before; on_nonfinite='skip' would "
                "leave such steps out"
            )
        if not math.isfinite(size):
            raise NonFiniteError(
                f"step {step} would make the weights infinite or NaN at learning rate {self.rule.rates()}, "
                "so they were left as before: clip the gradients, or lower the optimizer's lr if warm_start is off "
                "(to continue from here, load a checkpoint: the optimizer's own state has taken the gradient in)"
            )


def _rounding(look_aheads: LookAheads) -> float:
    """Return the relative error of a loss; changes below it say nothing.

    The average over a batch takes some of the error of its elements. Weights in bfloat16 are rounded where the
    look-ahead ends, all at once.
    """
    if torch.bfloat16 in {parameter.dtype for parameter in look_aheads.parameters}:
        return torch.finfo(torch.bfloat16).eps * 4
    autocast = look_aheads.batches[0].autocast
    return torch.finfo(autocast.dtype if autocast.enabled else torch.float32).eps / 4
