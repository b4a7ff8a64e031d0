"""What both front doors share: hooks on the optimizer, when to meta-step, records, checkpoints, taking it all off."""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apo.arguments import whole_number
from apo.core.batches import fsd_batches
from apo.core.meta_step import Engine
from apo.core.objective import ProximalObjective
from apo.core.records import History, MetaStep
from apo.distributed import whole
from apo.errors import ApoWarning, ReplayError
from apo.loop.hooks import Hooks
from apo.loop.step_hooks import is_inner_step, run_first, run_last, unscale_fused, with_closure
from apo.passes.isolation import RandomState
from apo.passes.network import devices_of
from apo.passes.recording import Call, Recording, Slot, as_call, tree_map
from apo.rules.base import Rule
from apo.rules.choice import as_rule
from apo.vectors import assign_, copies

__all__ = ["Tuner"]

#: The optimizers that have a tuner now: a second one would take the first one's steps for the optimizer's own.
_TUNED: weakref.WeakSet[Any] = weakref.WeakSet()


class _Replaying(threading.local):
    """Whether some tuner runs a network now: such passes are no training, whoever watches the same network."""

    now = False


_REPLAYING = _Replaying()


class Tuner:
    """Learns the meta-parameters of a rule from the optimizer's own steps.

    Not built directly: :class:`apo.APO` runs the training step itself, :func:`apo.attach` watches a loop that exists.

    Args:
        model: The network.
        rule: A rule, or an optimizer whose learning rate (or, for a preconditioner, whose matrices) shall be learned.
        criterion: The loss function; None if the network returns its loss.
        fsd_weight: Weight of the function-space term; None for the rule's default.
        wsd_weight: Weight of the weight-space term; None for the rule's default.
        discrepancy: The divergence between outputs, or ``"auto"`` for the one that belongs to the loss.
        mask: Which positions count in the function-space term, see :class:`apo.ProximalObjective`.
        fsd_batch: ``"previous"``, ``"same"`` or an iterable of batches, see :mod:`apo.core.batches`.
        interval: Steps between meta-steps, K in Algorithm 1.
        other_batch_share: Share of the loss term that is taken on B' instead of B, see :class:`apo.ProximalObjective`;
            None for the rule's default. 1 is the ablation of the paper's appendix D: the learned rate collapses.
        total_steps: How many steps the optimizer will take, if known: in the second half of them the share above rises
            to 1, so that a learned rate falls towards the end, see :mod:`apo.core.horizon`.
        scaler: The ``torch.amp.GradScaler`` of a float16 run.
        cuda_graph: Capture the network's passes in a meta-step as CUDA graphs. Where the host cannot keep up with the
            GPU, as with small networks or batches, replaying them costs a fraction of running them; they keep memory
            for one more set of activations. It takes a network that maps one tensor to one, without random numbers, in
            one process; any other runs as it does without.
        on_meta_step: Called with the :class:`MetaStep` of every meta-step, for logging.
        history_limit: How many records :attr:`history` keeps.

    Attributes:
        history: The records of the meta-steps so far.
        steps: How many steps the optimizer has taken.
        skipped_meta_updates: How many meta-gradients were not finite.

    Example:
        >>> import apo, torch
        >>> model = torch.nn.Linear(4, 3)
        >>> tuner = apo.APO(model, torch.optim.Adam(model.parameters()), torch.nn.functional.cross_entropy, interval=5)
        >>> isinstance(tuner, apo.Tuner), [step for step in range(12) if tuner.is_meta_step(step)]
        (True, [0, 5, 10])
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule | Optimizer,
        criterion: Callable | None,
        *,
        fsd_weight: float | None = None,
        wsd_weight: float | None = None,
        discrepancy: Any = "auto",
        mask: Any = "auto",
        fsd_batch: Any = "previous",
        interval: int = 10,
        other_batch_share: float | None = None,
        total_steps: int | None = None,
        scaler: Any = None,
        cuda_graph: bool = False,
        on_meta_step: Callable[[MetaStep], None] | Iterable[Callable[[MetaStep], None]] | None = None,
        history_limit: int = 10_000,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {scaler!r}")
        if not isinstance(cuda_graph, bool):
            raise TypeError(f"cuda_graph must be True or False, got {cuda_graph!r}")
        if (rule.optimizer if isinstance(rule, Rule) else rule) in _TUNED:
            raise ValueError(
                "optimizer already has a tuner: use that one, or call its detach() before building another"
            )
        self.model = model
        self.rule = as_rule(rule)
        self.interval = whole_number("interval", interval)
        self.objective = ProximalObjective(
            self.rule.fsd_weight if fsd_weight is None else fsd_weight,
            self.rule.wsd_weight if wsd_weight is None else wsd_weight,
            discrepancy,
            criterion,
            mask,
            self.rule.other_batch_share if other_batch_share is None else other_batch_share,
            total_steps,
        )
        self.fsd_batches = fsd_batches(fsd_batch, self._record_batch)
        if total_steps is not None and self.fsd_batches.is_same:
            raise ValueError(f"total_steps={total_steps} needs a batch beside the step's own: drop fsd_batch='same'")
        self.engine = Engine(model, criterion, self.rule, self.objective, self.fsd_batches, scaler, cuda_graph)
        self.history = History(history_limit)
        self.steps = 0
        self.skipped_meta_updates = 0
        self._listeners = [on_meta_step] if callable(on_meta_step) else list(on_meta_step or ())
        self._recordings: list[Recording] = []
        self._theta: dict[Tensor, Tensor] | None = None
        self._warned: set[str] = set()
        self._loaded: dict[str, Any] | None = None
        self._left_out = False
        self._in_closure = False
        self._begun = False  # whether a meta-step has been taken
        self._hooks = Hooks()
        self._install_hooks()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that moves the weights."""
        return self.rule.optimizer

    @property
    def device(self) -> torch.device:
        """Where the first parameter lives."""
        return next(self._parameters()).device

    def _parameters(self) -> Iterator[Tensor]:
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def is_meta_step(self, step: int | None = None) -> bool:
        """Tell whether the step with this index (the next one, by default) learns the meta-parameters."""
        step = self.steps if step is None else step
        return step % (self.rule.interval or self.interval) == 0

    def on_meta_step(self, listener: Callable[[MetaStep], None]) -> None:
        """Call ``listener`` with the record of every meta-step from now on."""
        self._listeners.append(listener)

    def detach(self) -> None:
        """Remove every hook; the optimizer stays, as an ordinary one at the rates in force."""
        self._mend()
        self._hooks.remove()
        _TUNED.discard(self.optimizer)
        self.rule.detach()
        self._forget()

    def __enter__(self) -> Tuner:
        """Return the tuner; leaving the block detaches it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Detach."""
        self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tuner:
        """Copy the tuner with its network and optimizer: an independent run that goes on in the same way."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        attributes = {name: value for name, value in vars(self).items() if name not in ("_hooks", "_before")}
        vars(twin).update(copy.deepcopy(attributes, memo))
        twin._hooks = Hooks()
        twin._install_hooks()
        return twin

    def __reduce__(self) -> Any:
        """Refuse to be pickled: the copy would watch nothing."""
        raise TypeError("a tuner cannot be pickled, since its hooks would be lost: save state_dict() instead")

    # ------------------------------------------------------------------ watching the optimizer

    def _install_hooks(self) -> None:
        optimizer, hooks = self.optimizer, self._hooks
        _TUNED.add(optimizer)
        self._before = hooks.add(optimizer.register_step_pre_hook, self._before_step)
        after = hooks.add(optimizer.register_step_post_hook, self._after_step)
        run_first(optimizer._optimizer_step_post_hooks, after)
        hooks.add(optimizer.register_state_dict_pre_hook, self._mend)
        hooks.add(self.model.register_state_dict_pre_hook, self._mend, weak=True)
        hooks.add(optimizer.register_state_dict_post_hook, self._after_state_dict)
        hooks.add(optimizer.register_load_state_dict_pre_hook, self._before_load)
        hooks.add(optimizer.register_load_state_dict_post_hook, self._after_load)

    def _wants_recording(self) -> bool:
        """Whether this iteration's forward pass will be needed: by its own meta-step, or as B' of the next one."""
        if _REPLAYING.now:
            return False
        return self.is_meta_step() or (self.fsd_batches.keeps_previous and self.is_meta_step(self.steps + 1))

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if is_inner_step(optimizer):
            return None
        self._mend()
        self.rule.before_any_step()
        is_meta_step = self.is_meta_step()
        self._left_out = is_meta_step and unscale_fused(optimizer)
        if self._left_out or not is_meta_step:
            return None
        parameters = list(self._parameters())
        self._theta = dict(zip(parameters, copies(parameters), strict=True))
        self.rule.before_step()
        return with_closure(args, kwargs, self._as_if_outside)

    def _as_if_outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Have a closure find the optimizer as it is outside a step."""

        def run() -> Any:
            self.rule.break_off()
            self._in_closure = True
            try:
                loss = closure()
            finally:
                self._in_closure = False
            self.rule.before_step()
            return loss

        return run

    def _mend(self, *_: Any) -> None:
        """Undo a step that was broken off half-way, by Ctrl-C say: its weights were for measuring, not for use."""
        if self._theta is None or self._in_closure:
            return
        theta, self._theta = self._theta, None
        self._go_back_to(theta)

    def _go_back_to(self, theta: dict[Tensor, Tensor]) -> None:
        assign_(list(theta), list(theta.values()))
        self.rule.break_off()

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if is_inner_step(optimizer):
            return
        run_last(optimizer._optimizer_step_pre_hooks, self._before)  # before the next step, whoever came later
        theta, self._theta = self._theta, None
        if self._left_out:
            self._forget()  # a fused optimizer found an overflow and stayed where it was: the step does not count
            return
        _REPLAYING.now = True
        try:
            recordings = self._used_recordings()
            record = None if theta is None else self._meta_step(theta, recordings)
        except BaseException:
            if theta is not None:
                self._go_back_to(theta)  # leave the last good weights behind
            raise
        finally:
            _REPLAYING.now = False
        if recordings and self.fsd_batches.keeps_previous and self.is_meta_step(self.steps + 1):
            self.fsd_batches.keep(recordings[-1])
        self._forget()
        self.steps += 1
        if record is not None:
            self._publish(record)

    def _forget(self) -> None:
        """Drop what is known of the forward passes of this iteration."""
        self._recordings.clear()

    def _gradients_are_clear(self) -> bool:
        """Tell whether accumulation begins anew: asked only if an earlier pass of this iteration is known."""
        gradients = (p.grad for p in self._parameters())
        return not any(gradient is not None and bool(whole(gradient.any())) for gradient in gradients)

    def _used_recordings(self) -> list[Recording]:
        """Return the forward passes whose gradients the step has used."""
        if not self.is_meta_step():
            return list(self._recordings)
        parameters = list(self._parameters())
        return [recording.settled(parameters) for recording in self._recordings]

    def _meta_step(self, theta: dict[Tensor, Tensor], recordings: list[Recording]) -> MetaStep | None:
        if not recordings and self.rule.moved():
            raise ReplayError(self._no_recording_message())
        record = self.engine.meta_step(self.steps, theta, recordings, first=not self._begun)
        self._begun |= record is not None
        return record

    def _no_recording_message(self) -> str:
        return "a meta-step was due but its training batch is unknown: call tuner.backward(...) before tuner.step()"

    def _publish(self, record: MetaStep) -> None:
        self.history.append(record)
        for listener in self._listeners:
            listener(record)
        messages = self.rule.warnings() + self.objective.warnings(record.step)
        if not record.updated:
            self.skipped_meta_updates += 1
            messages.append(
                "a meta-gradient was not finite, so its meta-update was left out (skipped_meta_updates counts them): "
                "the look-ahead diverges, lower the rate or clip the gradients"
            )
        for message in messages:
            if message not in self._warned:
                self._warned.add(message)
                warnings.warn(f"step {record.step}: {message}", ApoWarning, stacklevel=2)

    def _record_batch(self, batch: Any, current: Recording) -> Recording:
        """Turn a batch of ``fsd_batch`` into a recording: ``(inputs, target)``, or the network's inputs alone."""
        batch = _to_device(batch, self.device)
        if self.engine.criterion is None or not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            return Recording((as_call(batch),), None, {}, current.slots, current.autocast)
        inputs, target = batch
        slot = Slot(0, 0, current.slots[0].path, current.slots[0].shape) if current.slots else Slot(0)
        return Recording((as_call(inputs),), (None, target), {}, (slot,), current.autocast)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact resume needs beside the network's own ``state_dict``.

        That is the optimizer, phi, the meta-optimizer, counters, the batch source, the records and the random streams
        of torch, Python and NumPy. It is plain data for ``torch.load(weights_only=True)``.
        """
        optimizer = self.optimizer.state_dict()
        own = optimizer.pop("apo")
        return own | {"optimizer": optimizer, "random": RandomState.capture({self.device}).state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, restore_random: bool = True) -> None:
        """Go on exactly where :meth:`state_dict` was called.

        Args:
            state: What it returned.
            restore_random: Set the random streams as well.
        """
        self.optimizer.load_state_dict({**state["optimizer"], "apo": state})
        if restore_random:
            RandomState.from_state_dict(state["random"]).restore()

    def _own_state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "begun": self._begun,
            "skipped_meta_updates": self.skipped_meta_updates,
            "rule": self.rule.state_dict(),
            "fsd_batches": self.fsd_batches.state_dict(),
            "history": self.history.state_dict(),
        }

    def _after_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Let the tuner's state travel inside the optimizer's, so that existing checkpoint code saves it."""
        for group in state["param_groups"]:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = float(group["lr"])
        state["apo"] = self._own_state()

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._mend()
        self._loaded = state.pop("apo", None)

    def _after_load(self, optimizer: Optimizer) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            self.rule.adopt_optimizer_state()
            return
        self.steps = int(loaded["steps"])
        self._begun = bool(loaded.get("begun", self.steps > 0))  # 0.1.0 did not say
        self.skipped_meta_updates = int(loaded["skipped_meta_updates"])
        self.rule.load_state_dict(loaded["rule"])
        self.fsd_batches.load_state_dict(loaded["fsd_batches"], self.device)
        self.history.load_state_dict(loaded["history"])
        self._forget()

    def _replayable(self, call: Call) -> Call:
        """Note what running a call again depends on; the batch of another step serves as B', with other randomness."""
        if not self.is_meta_step():
            return call
        return replace(call, random_state=RandomState.capture(devices_of(self.model))).sealed()


def _to_device(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda tensor: tensor.to(device, non_blocking=True), batch)
