"""The one-line front door: ``apo.attach(optimizer, model, criterion)``, and the training loop stays as it is.

Everything is observed through PyTorch's own hooks: the network's forward hooks give the inputs and outputs, the
criterion's forward hook gives the targets, a hook on the loss gives the weight with which it was back-propagated, and
the optimizer's step hooks say when the weights move. One iteration of the loop::

    model(x)             _before_forward, _after_forward    the call and its output are kept
    criterion(out, y)    _before_loss, _after_loss          the criterion's arguments are traced to outputs: a Recording
    loss.backward()      _note_backward                     the weight of that loss in what is back-propagated
    optimizer.step()     _before_step, _after_step          the step, measured on a meta-step; then all is dropped
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apo.core.mismatch import Idle, fills_gradients
from apo.distributed import are_several, leaves_gradients
from apo.errors import ReplayError
from apo.loop.checks import warn_of_maximising
from apo.loop.hooks import (
    is_inner_step,
    refuse_compiled_step,
    run_first,
    run_last,
    takes_gradients_away,
    unscale_fused,
    with_closure,
)
from apo.loop.outputs import Outputs
from apo.loop.tuner import Tuner
from apo.passes.isolation import every_module
from apo.passes.recording import Autocast, Call, Recording, own_loss, own_prediction, tree_map
from apo.torch_internals import functorch_transform, step_post_hooks, step_pre_hooks

__all__ = ["Attached", "attach", "criterion"]


@dataclass(eq=False)
class _Observed:
    """A loss that was computed, and the weight with which it was back-propagated (None: not at all, so far)."""

    recording: Recording
    order: int = 0  # which of the losses of this iteration it was
    weight: Tensor | None = None
    passes: int = 0  # how often it was back-propagated
    probed: Tensor | None = None  # the weight in `torch.autograd.grad`
    left_gradients: bool = True  # in the parameters, see `leaves_gradients`


class _FunctionalLoss(nn.Module):
    """A functional loss as a module, so that it can be watched."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the function."""
        return self.function(*args, **kwargs)


def criterion(function: Callable[..., Tensor]) -> nn.Module:
    """Wrap a functional loss so that :func:`attach` can watch it; use the result in its place in the loop.

    Example:
        >>> import apo, torch, torch.nn.functional as F
        >>> loss_function = apo.criterion(F.cross_entropy)
        >>> loss_function(torch.zeros(2, 4), torch.tensor([0, 1])).item() > 1
        True
    """
    if isinstance(function, type):
        raise TypeError(f"function must be a loss, got the class {function.__name__}: pass an instance of it")
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    return _FunctionalLoss(function)


class Attached(Tuner):
    """A tuner that watches an existing training loop; made by :func:`attach`.

    Gradient accumulation, clipping, closures, autocast and loss scaling are observed as they happen. Micro-batches are
    weighted as they were back-propagated; if the total weight exceeds their number, a loss scale not made known
    through ``scaler=`` is assumed and divided out. What ``torch.autograd.grad`` does to a loss counts only if the
    iteration has no ``backward()``: otherwise it is taken for an inspection of the gradients, such as their noise.

    Arguments of the network that carry a graph, such as features of an encoder that another optimizer trains, are
    constants to a meta-step. What the loop does to the network's output before the criterion sees it (a transpose, a
    slice, a mask, a temperature, a cast) is noted and repeated at the other weights; what draws random numbers or
    changes tensors in place cannot be, and is refused: move it into the criterion.

    Example:
        >>> import apo, torch
        >>> model, criterion = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()
        >>> with apo.attach(torch.optim.Adam(model.parameters()), model, criterion) as tuner:
        ...     criterion(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
        ...     tuner.optimizer.step()
        >>> len(tuner.history)
        1
    """

    _door = "apo.attach"
    _no_recording = (
        "a meta-step was due, but no loss of the watched network was back-propagated since the last step: call "
        "model(...) and criterion(...) themselves, not model.forward, a copy, another criterion or torch.func.grad, in "
        "every iteration, and attach before torch.compile first runs a function that calls them"
    )
    _outputs: Outputs
    _idle: Idle
    _pending: Call | None
    _observed: list[_Observed]  # those that were back-propagated
    _losses: int
    _criterion: nn.Module | None
    _skipped = False  # whether the step that is under way has lost its gradients, see `on_nonfinite`
    _left_out = False  # whether a fused optimizer leaves out the step that is under way

    def _watchable(self, criterion: Any) -> Callable[..., Tensor] | None:
        if criterion is not None and not isinstance(criterion, nn.Module):
            raise TypeError(
                f"criterion must be a torch.nn.Module so that it can be watched, got {criterion!r}: "
                "wrap it, criterion = apo.criterion(your_function), and call the wrapped one in the loop"
            )
        self._criterion, self._outputs = criterion, Outputs()
        return criterion.function if isinstance(criterion, _FunctionalLoss) else criterion

    def _install_hooks(self) -> None:
        super()._install_hooks()
        optimizer, hooks = self.optimizer, self._hooks
        self._idle = Idle(self.model, optimizer)
        step_hook, refuse = optimizer.register_step_pre_hook, refuse_compiled_step
        self._before = hooks.add(step_hook, self._before_step, when_compiled=refuse)
        after = hooks.add(optimizer.register_step_post_hook, self._after_step)
        run_first(step_post_hooks(optimizer), after)
        # The optimizer owns the tuner: when it is dropped, a network that lives on keeps nothing of either.
        watch: Any = {"weak": True, "with_kwargs": True}
        hooks.add(self.model.register_forward_pre_hook, self._before_forward, **watch)
        hooks.add(self.model.register_forward_hook, self._after_forward, **watch)
        if self._criterion is not None:
            hooks.add(self._criterion.register_forward_pre_hook, self._before_loss, **watch)
            hooks.add(self._criterion.register_forward_hook, self._after_loss, **watch)

    # ------------------------------------------------------------------ the optimizer's step

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if is_inner_step(optimizer):
            return None
        due = self.is_meta_step()
        self._left_out = due and unscale_fused(optimizer)
        if self._left_out:
            return None
        in_closure = with_closure(args, kwargs, self._as_if_outside) if due or self._skips else None
        self._skipped = self._skips and in_closure is None and takes_gradients_away(self._parameters())
        if self._skipped:
            return None
        if due:
            self._note_place()
        self._begin_step()
        if self._theta is not None:
            self.engine.note_gradients(self.steps, self._theta)
        return in_closure

    def _as_if_outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Let a closure find the optimizer as it is outside a step."""

        def run() -> Any:
            self._measuring.close()
            self._in_closure = True
            try:
                loss = closure()
            finally:
                self._in_closure = False
            self._skipped = self._skips and takes_gradients_away(self._parameters())
            if self._theta is not None:
                self._note_place()
                self.engine.note_gradients(self.steps, self._theta)
                self._measuring.enter_context(self.rule.measuring())
            return loss

        return run

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if is_inner_step(optimizer):
            return
        self._idle.note_step()
        # Ours has to run last before the next step, also if a hook was added since.
        run_last(step_pre_hooks(optimizer), self._before)
        if self._left_out:
            self._forget()  # after an overflow the fused optimizer stayed where it was: the step does not count
            return
        if self._skipped:
            return self._skip()
        self._finish_step()

    def _note_place(self) -> None:
        """Let passes forget their losses if the weights have moved since."""
        place = self._place()
        for observed in self._observed:
            observed.recording = observed.recording.stepped_from(place)

    # ------------------------------------------------------------------ the forward and backward passes

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._theta is not None:
            self._abandon()
        if _is_training() and self._wants_recording():
            self.engine.find_wrapper()
            call = Call(args, kwargs)
            self._pending = call.sealed(self.model) if self.is_meta_step() else call

    def _after_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if _is_training():
            self._idle.note_pass(output)
        call, self._pending = self._pending, None
        if call is None:
            return
        if self._criterion is None:
            if not _is_inference(output):
                alone = Recording((call,), None, {}, (), Autocast.capture(self.device.type))
                self._observe(own_loss(output), alone, own_prediction(output))
        else:
            self._outputs.add(call, output)

    def _before_loss(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._outputs.calls:
            self._outputs.rest(args, kwargs)

    def _after_loss(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], loss: Tensor) -> None:
        if not self._outputs.calls:
            return
        if _is_training() and self._wants_recording() and _has_gradient(loss):
            calls, slots = self._outputs.slots(args, kwargs)
            values: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}  # of all arguments, by position or name
            filled = [values[slot.position] for slot in slots]
            prediction = filled[0] if len(filled) == 1 else tuple(filled)
            values |= {slot.position: None for slot in slots}  # left open
            rest, named = tuple(map(values.get, range(len(args)))), {name: values[name] for name in kwargs}
            recording = Recording(calls, rest, named, slots, Autocast.capture(self.device.type))
            self._observe(loss, recording, prediction)
        self._outputs.wake()

    def _observe(self, loss: Tensor, recording: Recording, prediction: Any) -> None:
        """Keep a loss with its recording, and wait for its backward pass."""
        if self.is_meta_step():
            kept = tree_map(Tensor.detach, prediction) if self.fsd_batches.is_same else None
            # The loop may call model.eval() before the step, and may weight the loss in place.
            modules = every_module([self.model] if self._criterion is None else [self.model, self._criterion])
            modes = tuple([(module, module.training) for module in modules])
            recording = recording.ended(loss.detach().clone(), kept, self._place(), modes=modes)
        observed = _Observed(recording, self._losses)
        self._losses += 1
        earlier = [other for other in self._observed if other.weight is not None]
        owner = weakref.ref(self)  # the loss may outlive the tuner, or be kept by it
        # Only the loss keeps what was observed, until it is back-propagated: a validation without no_grad would else
        # keep all of its batches until the next step.

        def note(weight: Tensor) -> None:
            tuner = owner()
            if tuner is not None:
                tuner._note_backward(observed, earlier, weight)

        loss.register_hook(note)

    def _note_backward(self, observed: _Observed, earlier: list[_Observed], weight: Tensor) -> None:
        """Receive the weight with which a loss is back-propagated, after some earlier ones."""
        weight = weight.detach().clone()
        if observed not in self._observed:
            self._observed = sorted([*self._observed, observed], key=lambda each: each.order)
        if not fills_gradients(self._parameters()):
            observed.probed = weight
            return
        again = observed.weight is not None and not (observed.left_gradients and self._gradients_are_clear())
        observed.weight = observed.weight + weight if again else weight  # type: ignore[operator]
        observed.passes = observed.passes + 1 if again else 1
        observed.left_gradients = not are_several() or leaves_gradients(self.engine.network)
        if earlier and earlier[-1].left_gradients and self._gradients_are_clear():
            # They were of a step that a GradScaler left out.
            self._observed = [other for other in self._observed if other not in earlier]

    def _used_recordings(self) -> list[Recording]:
        if not self._observed:
            return []
        used = self._back_propagated()
        self._forget()
        if not used or (len(used) == 1 and not self.is_meta_step()):  # the weight of one loss alone is not asked for
            return [observed.recording for observed in used]
        weights = [observed.weight for observed in used if observed.weight is not None]
        if {(weight.device.type, weight.ndim) for weight in weights} == {("cpu", 0)}:
            weights = [weight.item() for weight in weights]  # reading these waits for no device
        if not self.begun:  # one look at the first meta-step: reading a weight may wait for a device
            warn_of_maximising(self.engine.criterion, weights)
        divisor = self._loss_scale(weights, sum(observed.passes for observed in used))
        return [replace(each.recording, weight=w / divisor) for each, w in zip(used, weights, strict=True)]

    def _back_propagated(self) -> list[_Observed]:
        """Return the losses that made the gradients: those of ``backward()``, else those of ``torch.autograd.grad``."""
        used = [observed for observed in self._observed if observed.weight is not None]
        if not used:
            probed = [observed for observed in self._observed if observed.probed is not None]
            used = [replace(observed, weight=observed.probed, passes=1) for observed in probed]
        if self._criterion is None:
            return used
        # A loss without an output of the network may be that of another network with the same criterion.
        others = [observed.recording for observed in used if not observed.recording.slots]
        used = [observed for observed in used if observed.recording.slots]
        if others and (not used or any(other.depends_on(self._parameters()) for other in others)):
            raise ReplayError(
                "the criterion was called on something that was made of an output of the network in a way that cannot "
                "be repeated at other weights (random numbers, or a tensor changed in place), or it calls the network "
                "itself: call the network outside, and move what is between its output and the criterion into the "
                "criterion, criterion = apo.criterion(your_function)"
            )
        return used

    def _loss_scale(self, weights: Sequence[Tensor | float], passes: int) -> Tensor | float:
        scaler = self.engine.scaler
        if scaler is not None:
            return float(scaler.get_scale()) if scaler.is_enabled() else 1.0
        limit = 1.01 * passes
        total = sum(weight.abs().sum() if isinstance(weight, Tensor) else abs(weight) for weight in weights)
        if isinstance(total, Tensor):
            return torch.where(total > limit, total, 1.0)
        return total if total > limit else 1.0

    def _forget(self) -> None:
        self._outputs.forget()
        self._observed, self._pending, self._losses = [], None, 0


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _with_arguments_of(
    build: Callable[_Arguments, _Result],
) -> Callable[[Callable[..., _Result]], Callable[_Arguments, _Result]]:
    """Give a function the signature of another one, for readers and type checkers: the options are listed once."""

    def decorate(function: Callable[..., _Result]) -> Callable[_Arguments, _Result]:
        function.__signature__ = inspect.signature(build)  # type: ignore[attr-defined]
        return function

    return decorate


@_with_arguments_of(Attached)
def attach(*args: Any, **options: Any) -> Attached:  # noqa: D417 - the arguments are those of Attached
    """Let an existing training loop learn its learning rate; nothing after this line has to change.

    Args:
        optimizer: The optimizer of the loop, or a rule around it such as ``apo.LearningRate(optimizer, ...)``.
        model: The network that the loop calls.
        criterion: The loss module that the loop calls on the network's output (a function is made one by
            :func:`apo.criterion`); None if the network's output carries its ``loss``, as Hugging Face models' do.
        options: All others are keywords, see :class:`apo.Tuner`; pass ``total_steps`` if you know it.

    Returns:
        The tuner: read ``history``, save ``state_dict()`` (it also travels inside ``optimizer.state_dict()``), call
        ``detach()`` or use it as a context manager to take everything off again.

    Example:
        >>> import apo, torch
        >>> _ = torch.manual_seed(0)
        >>> model, criterion = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> tuner = apo.attach(optimizer, model, criterion)
        >>> x, y = torch.randn(16, 4), torch.randint(3, (16,))
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     loss = criterion(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        >>> len(tuner.history), optimizer.param_groups[0]["lr"] == tuner.history[-1].lr[0]
        (20, True)
    """
    return Attached(*args, **options)


def _is_inference(output: Any) -> bool:
    # A network that returns (logits, loss) returns None for the loss if it has no targets.
    return isinstance(output, (tuple, list)) and any(item is None for item in output)


def _has_gradient(loss: Any) -> bool:
    if not isinstance(loss, Tensor):
        raise TypeError(f"criterion must return a tensor, got {type(loss).__name__}: let it return the loss alone")
    return loss.requires_grad


def _is_training() -> bool:
    # torch.func runs the network for somebody's own gradients, not for training.
    return torch.is_grad_enabled() and functorch_transform() is None
