"""What both front doors share: when to meta-step, records and warnings, checkpoints, detaching.

A tuner is idle between steps. One step takes it through these states::

    idle --_begin_step()--> stepping --_finish_step()--> idle         steps += 1; a meta-step publishes its record
                               |
                               +--_abandon()--> idle                  weights back at theta, rates as they were

``stepping`` matters on meta-steps only: the weights before the step are kept, and the optimizer is prepared for a step
that is measured. A step that fails, is interrupted or is left out by a GradScaler is abandoned, at the latest when
somebody next reads the weights: the measured step must never be seen or saved.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apo.arguments import whole_number
from apo.core.batches import fsd_batches
from apo.core.meta_step import Engine
from apo.core.objective import ProximalObjective
from apo.core.records import History, MetaStep
from apo.discrepancy import Discrepancy
from apo.distributed import whole
from apo.errors import ApoWarning, NonFiniteError, ReplayError
from apo.loop.checkpoints import drop_summary, has_taken_steps, put_summary, take_summary
from apo.loop.checks import check_arguments
from apo.loop.hooks import REPLAYING, Hooks
from apo.passes.isolation import RandomState, place_of
from apo.passes.recording import Recording, tree_map
from apo.rules import as_rule
from apo.rules.base import Rule
from apo.vectors import assign_, copies

__all__ = ["Tuner"]

_NOT_UPDATED = (
    "a meta-gradient was not finite, so its meta-update was left out (skipped_meta_updates counts them): the "
    "look-ahead diverges, lower the rate or clip the gradients"
)


class Tuner:
    """Learns the meta-parameters of a rule from the optimizer's own steps.

    Built by :class:`apo.APO`, which runs the training step itself, and :func:`apo.attach`, which watches a loop.

    Args:
        optimizer: The optimizer whose learning rate (or, for a preconditioner, whose matrices) is learned, or a rule
            around it such as ``apo.LearningRate(optimizer, ...)``.
        model: The network.
        criterion: The loss function; None if the network's output carries its ``loss``, as Hugging Face models' do.
        total_steps: How many steps the optimizer will take, if known: over the second half of them the learned rate
            then falls towards the end, see :mod:`apo.core.objective`.
        interval: Steps between meta-steps, K in Algorithm 1. ``"auto"`` leaves them to the rule: 10, or for a learning
            rate 1 for 50 steps (the warm-up is learned), then 10 and, from step 500 on, ever more up to 100.
        fsd_weight: Weight of the function-space term; None for the rule's default.
        wsd_weight: Weight of the weight-space term; None for the rule's default.
        other_batch_share: Share of the loss term that is taken on B' instead of B, see :class:`apo.ProximalObjective`;
            None for the rule's default. 1 is the ablation of the paper's appendix D: the learned rate collapses.
        discrepancy: The divergence between outputs, or ``"auto"`` for the one that belongs to the loss, see
            :func:`apo.discrepancy.for_loss`; ``tuner.objective.discrepancy`` shows what it chose.
        mask: Which positions count in the function-space term, see :class:`apo.ProximalObjective`.
        fsd_batch: ``"previous"``, ``"same"`` or an iterable of batches, see :mod:`apo.core.batches`.
        scaler: The ``torch.amp.GradScaler`` of a float16 run.
        cuda_graph: Capture the network's passes in a meta-step as CUDA graphs, which helps where the host cannot keep
            up with the GPU and needs memory for one more set of activations. Only a network in one process that maps
            one tensor to one, without random numbers, is captured; any other runs as it does without.
        on_nonfinite: ``"raise"`` an error at a meta-step that is not finite, or ``"skip"`` every step that is not; that
            looks at all gradients and so waits for the device.
        on_meta_step: Called with the :class:`MetaStep` of every meta-step, for logging; one function or several.
        history_limit: How many records :attr:`history` keeps.
        save_batch: Let ``optimizer.state_dict()`` hold the batch of the step before, as :meth:`state_dict` always does.
            A resume right before a meta-step is exact only with it; but the file then holds training data.
        loss: The old name of ``criterion``.

    Attributes:
        history: The records of the meta-steps so far.
        steps: How many steps the optimizer has taken.
        skipped_meta_updates: How many meta-gradients were not finite.
        begun: Whether the rule has found where to start: by its first meta-step, or because it was loaded.
        skipped_steps: How many steps were left out, see ``on_nonfinite``.

    Example:
        >>> import apo, torch
        >>> model = torch.nn.Linear(4, 3)
        >>> tuner = apo.APO(torch.optim.Adam(model.parameters()), model, torch.nn.functional.cross_entropy, interval=5)
        >>> isinstance(tuner, apo.Tuner), [step for step in range(12) if tuner.is_meta_step(step)]
        (True, [0, 5, 10])
    """

    _door = "apo.APO"  # how users call it, for messages
    _no_recording: str  # what to say when a meta-step has no pass to run again
    _in_closure = False  # whether the step's closure runs now

    def __init__(
        self,
        optimizer: Rule | Optimizer,
        model: nn.Module,
        criterion: Callable[..., Tensor] | None = None,
        *,
        total_steps: int | None = None,
        interval: int | str = "auto",
        fsd_weight: float | None = None,
        wsd_weight: float | None = None,
        other_batch_share: float | None = None,
        discrepancy: Discrepancy | str = "auto",
        mask: Callable[[Recording], Tensor | None] | str | None = "auto",
        fsd_batch: str | Iterable[Any] = "previous",
        scaler: Any = None,
        cuda_graph: bool = False,
        on_nonfinite: str = "raise",
        on_meta_step: Callable[[MetaStep], None] | Iterable[Callable[[MetaStep], None]] | None = None,
        history_limit: int = 10_000,
        save_batch: bool = False,
        loss: Callable[..., Tensor] | None = None,
    ) -> None:
        optimizer, model, criterion = self._in_old_form(optimizer, model, criterion, loss)
        check_arguments(self._door, optimizer, model, criterion, scaler, cuda_graph, on_nonfinite, save_batch)
        function = self._watchable(criterion)
        self.model = model
        self.rule = as_rule(optimizer)
        self.interval = "auto" if interval == "auto" else whole_number("interval", interval, "or 'auto'")
        share = 0.0 if fsd_batch == "same" else self.rule.other_batch_share
        self.objective = ProximalObjective(
            fsd_weight=self.rule.fsd_weight if fsd_weight is None else fsd_weight,
            wsd_weight=self.rule.wsd_weight if wsd_weight is None else wsd_weight,
            discrepancy=discrepancy,
            criterion=function,
            mask=mask,
            other_batch_share=share if other_batch_share is None else other_batch_share,
            total_steps=total_steps,
            share_is_default=other_batch_share is None,
        )
        self.fsd_batches = fsd_batches(fsd_batch, self._record_batch)
        if total_steps is not None and self.fsd_batches.is_same:
            raise ValueError(f"total_steps={total_steps} needs a batch beside the step's own: drop fsd_batch='same'")
        self.engine = Engine(model, function, self.rule, self.objective, self.fsd_batches, scaler, cuda_graph)
        self.history = History(whole_number("history_limit", history_limit))
        self.steps = self.skipped_meta_updates = self.skipped_steps = 0
        self.save_batch = save_batch
        self._skips = on_nonfinite == "skip"
        self._listeners = [on_meta_step] if callable(on_meta_step) else list(on_meta_step or ())
        self._theta: dict[Tensor, Tensor] | None = None  # the weights before the step, while a meta-step is under way
        self._measuring = ExitStack()  # what the rule prepared for that step
        self._warned: set[str] = set()
        self._loaded: dict[str, Any] | None = None
        self._due: bool | None = None  # whether the coming step is a meta-step, once somebody has asked
        self._forget()
        self._hooks = Hooks()
        self._install_hooks()
        summary = take_summary(self.rule)
        self.begun = summary is None and has_taken_steps(self.rule)
        if summary is not None:
            self._load_own_state(summary)

    def _in_old_form(self, optimizer: Any, model: Any, criterion: Any, loss: Any) -> tuple[Any, Any, Any]:
        """Accept the names of 0.1, with a warning, for one release."""
        if loss is None:
            return optimizer, model, criterion
        if criterion is not None:
            raise TypeError("criterion and loss are two names of one argument: pass criterion alone")
        warnings.warn("loss= is called criterion= now; the old name will be removed", ApoWarning, stacklevel=4)
        return optimizer, model, loss

    def _watchable(self, criterion: Any) -> Callable[..., Tensor] | None:
        """Return what the look-ahead calls."""
        return cast("Callable[..., Tensor] | None", criterion)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that moves the weights."""
        return self.rule.optimizer

    @property
    def device(self) -> torch.device:
        """Where the first parameter lives."""
        return next(p.device for group in self.rule.optimizer.param_groups for p in group["params"])

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.rule.optimizer.param_groups for p in group["params"]]

    def is_meta_step(self, step: int | None = None) -> bool:
        """Return whether the step with this index (the next one, by default) learns the meta-parameters."""
        if step is None:
            if self._due is None:  # decided once, so that all who ask during a step get the same answer
                self._due = self.engine.newcomers.are_waiting() or self.is_meta_step(self.steps)
            return self._due
        interval = self.rule.interval or self.interval
        if isinstance(interval, str):
            interval = next(interval for until, interval in self.rule.auto_intervals if step < until)
        return step % interval == 0

    def on_meta_step(self, listener: Callable[[MetaStep], None]) -> None:
        """Call ``listener`` with the record of every meta-step from now on."""
        self._listeners.append(listener)

    def detach(self) -> None:
        """Remove every hook; the optimizer stays, as an ordinary one at the rates in force."""
        self._abandon()
        self._hooks.remove()
        self.rule.detach()
        self._forget()

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tuner:
        """Copy the tuner with its network and optimizer: an independent run that continues in the same way."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        left_out = ("_hooks", "_before", "_measuring")
        vars(twin).update(copy.deepcopy({name: v for name, v in vars(self).items() if name not in left_out}, memo))
        twin._hooks, twin._measuring = Hooks(), ExitStack()
        twin._install_hooks()
        return twin

    def __reduce__(self) -> Any:
        """Refuse to be pickled: the copy would watch nothing."""
        raise TypeError("a tuner cannot be pickled, since its hooks would be lost: save state_dict() instead")

    # ------------------------------------------------------------------ a step

    def _begin_step(self) -> None:
        """Prepare for a step of the optimizer; on a meta-step, for one that is measured."""
        self._abandon()
        self.rule.before_step(self.objective.fade(self.steps))
        if self.is_meta_step():
            parameters = self._parameters()
            self._theta = dict(zip(parameters, copies(parameters), strict=True))
            self._measuring.enter_context(self.rule.measuring())

    def _abandon(self, *_: Any) -> None:
        """Undo a step that did not end: its weights were for measuring, not for use."""
        # The forward pass of a closure does not mean that its step was abandoned.
        if self._theta is not None and not self._in_closure:
            theta, self._theta = self._theta, None
            assign_(list(theta), list(theta.values()))
            self._measuring.close()

    def _finish_step(self) -> None:
        """Complete a step after the optimizer has stepped: learn phi if it is time, count, publish."""
        if self._theta is not None:
            self._measuring.close()
        theta, self._theta = self._theta, None  # from here on the network may run again: nothing is to be undone
        record = None
        REPLAYING.now = True
        try:
            recordings = self._used_recordings()
            if theta is not None:
                recordings = [recording.settled(list(theta)) for recording in recordings]
                if not recordings and any(p.grad is not None for p in theta):
                    raise ReplayError(self._no_recording)
                often = self.is_meta_step(self.steps + 1)
                record = self.engine.meta_step(self.steps, theta, recordings, not self.begun, often)
                self.begun |= record is not None
        except BaseException as error:
            if theta is not None:
                assign_(list(theta), list(theta.values()))  # leave the last good weights behind
            if not (self._skips and isinstance(error, NonFiniteError)):
                raise
            return self._skip()
        finally:
            REPLAYING.now, self._due = False, None
        if recordings and self.fsd_batches.keeps_previous and self.is_meta_step(self.steps + 1):
            self.fsd_batches.keep(recordings)
        self._forget()
        self.steps += 1
        if record is not None:
            self._publish(record)

    def _skip(self) -> None:
        """Leave a step out: it does not count."""
        self._abandon()
        self._forget()
        self.skipped_steps += 1
        self._warn_once(
            "skipped",
            f"step {self.steps} was left out because its gradients, its loss or the weights after it are not finite "
            "(skipped_steps counts such steps): look for NaN in the data, or clip the gradients",
        )

    def _publish(self, record: MetaStep) -> None:
        self.history.append(record)
        for listener in self._listeners:
            listener(record)
        self.skipped_meta_updates += not record.updated
        for message in [*record.warnings, *([] if record.updated else [_NOT_UPDATED])]:
            self._warn_once(message, f"step {record.step}: {message}")

    def _warn_once(self, about: str, sentence: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(sentence, ApoWarning, stacklevel=3)

    # ------------------------------------------------------------------ forward passes

    def _wants_recording(self) -> bool:
        """Return whether this iteration's forward pass is needed: by its own meta-step, or as B' of the next one."""
        return self.is_meta_step() or (self.fsd_batches.keeps_previous and self.is_meta_step(self.steps + 1))

    def _gradients_are_clear(self) -> bool:
        """Return whether accumulation starts again: asked only if an earlier pass of this iteration is known."""
        return not any(p.grad is not None and bool(whole(p.grad.any())) for p in self._parameters())

    def _place(self) -> tuple | None:
        """Return where the weights are; None if this iteration ends without a meta-step, which alone asks for it."""
        return place_of(self._parameters()) if self.is_meta_step() else None

    def _used_recordings(self) -> list[Recording]:
        """Return the forward passes whose gradients the step has used, each with its weight in the total loss."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop what is known of the forward passes of this iteration."""
        raise NotImplementedError

    def _record_batch(self, batch: Any, current: Recording) -> Recording:
        """Turn a batch of ``fsd_batch`` into a recording: ``(inputs, target)``, or the network's inputs alone."""
        batch = tree_map(lambda tensor: tensor.to(self.device, non_blocking=True), batch)
        return current.of_another_batch(batch, may_have_target=self.engine.criterion is not None)

    # ------------------------------------------------------------------ checkpoints

    def _install_hooks(self) -> None:
        """Let the tuner's state travel inside the optimizer's, and keep measured weights out of any checkpoint."""
        optimizer, hooks = self.optimizer, self._hooks
        hooks.add(optimizer.register_state_dict_pre_hook, self._abandon)
        hooks.add(self.model.register_state_dict_pre_hook, self._abandon, weak=True)
        hooks.add(optimizer.register_state_dict_post_hook, self._after_state_dict)
        hooks.add(optimizer.register_load_state_dict_pre_hook, self._before_load)
        hooks.add(optimizer.register_load_state_dict_post_hook, self._after_load)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact resume needs beside the network's own ``state_dict``.

        It is plain data for ``torch.load(weights_only=True)``, random streams included.
        """
        optimizer = self.optimizer.state_dict()
        drop_summary(optimizer["param_groups"])
        own = optimizer.pop("apo") | {"fsd_batches": self.fsd_batches.state_dict()}
        return own | {"optimizer": optimizer, "random": RandomState.capture({self.device}).state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, restore_random: bool = True) -> None:
        """Continue exactly where :meth:`state_dict` was called.

        Args:
            state: What it returned.
            restore_random: Set the random streams as well.
        """
        self.optimizer.load_state_dict({**state["optimizer"], "apo": state})
        if restore_random:
            RandomState.from_state_dict(state["random"]).restore()

    def _after_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        state["apo"] = {
            "steps": self.steps,
            "begun": self.begun,
            "skipped_meta_updates": self.skipped_meta_updates,
            "skipped_steps": self.skipped_steps,
            "rule": self.rule.state_dict(),
            "fsd_batches": self.fsd_batches.state_dict(with_batch=self.save_batch),
            "history": self.history.state_dict(),
        }
        put_summary(self.rule, state["apo"], state["param_groups"])

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._abandon()
        self._loaded = state.pop("apo", None)

    def _after_load(self, optimizer: Optimizer) -> None:
        summary = take_summary(self.rule)
        loaded, self._loaded, self._due = self._loaded or summary, None, None
        if loaded is None:
            self.rule.load_state_dict(None)
            self.begun = True  # the rate that was loaded is kept: no warm start
        else:
            self._load_own_state(loaded)
            self._forget()

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what lies under ``"apo"``, or the summary of it."""
        self.steps = int(state["steps"])
        self.begun = bool(state.get("begun", self.steps > 0))  # files of 0.1.0 do not have it
        self.skipped_meta_updates = int(state["skipped_meta_updates"])
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self.rule.load_state_dict(state["rule"])
        self.fsd_batches.load_state_dict(state["fsd_batches"], self.device)
        self.history.load_state_dict(state.get("history", []))
