"""Recorded forward passes that can be run again at other weights.

The loss term of the meta-objective needs the training step's own mini-batch, its dropout masks and its precision, and
the network's parameters at another point. A :class:`Recording` holds what is needed for that as plain data: the
arguments of the network's calls, the arguments of the criterion with the network's outputs left open (*slots*), the
random state and the autocast state. It is immutable; each stage of its life is a new one::

    the training pass of a meta-step            the training pass of the step before
        |  Recording(...)                           |  Recording(...)
        |  .ended()     the loss is known           |  .as_inputs()  owns its tensors, no random state: B'
        |  .settled()   arguments are constants     |  .state_dict() may travel in a checkpoint
        v                                           v
        B  .evaluate(network, criterion) at theta + Delta  <-->  B'  .evaluate(...) at theta and at theta + Delta
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from apo.errors import ReplayError
from apo.passes.isolation import PassState, every_module
from apo.passes.operations import EASY_WAY, Slot, depends_on, leaves, odd_type, tree_map
from apo.torch_internals import own_parameters, version_of

__all__ = [
    "Autocast", "Call", "Recording", "Slot", "as_arguments", "as_call", "odd_type", "own_loss", "own_prediction",
    "tree_map",
]  # fmt: skip


@dataclass(frozen=True)
class Autocast:
    """The autocast state of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def capture(cls, device_type: str) -> Autocast:
        """Read the state in force."""
        enabled = torch.is_autocast_enabled(device_type)
        return cls(device_type, enabled, torch.get_autocast_dtype(device_type))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Enter this state, unless it is in force.

        Autocast caches the 16-bit copies of the weights until its outermost region ends. The weights move before and
        after, so the cache is emptied: a stale copy would silently evaluate the network at other weights. (Switching
        the cache off instead would make a compiled network compile once more.)
        """
        in_force = Autocast.capture(self.device_type) == self
        torch.clear_autocast_cache()
        try:
            with nullcontext() if in_force else torch.autocast(self.device_type, self.dtype, self.enabled):
                yield
        finally:
            torch.clear_autocast_cache()


@dataclass(frozen=True)
class Call:
    """The arguments of one call of the network, with the state that it started from."""

    args: tuple
    kwargs: dict[str, Any]
    start: PassState | None = None  # None: the current one
    versions: tuple[int, ...] = ()  # version counters of its tensors, to notice a batch that was changed in place
    is_functional: bool = False  # whether the network ran with tensors in the place of its parameters

    def sealed(self, model: nn.Module) -> Call:
        """Note what the call starts from now, and the version counters of all tensors, as a meta-step needs it.

        As B' of another step a batch sees other random numbers.
        """
        modules = every_module([model])
        return Call(self.args, self.kwargs, PassState.capture(modules), self._versions(), _is_functional(modules))

    def ended(self) -> Call:
        """Return a copy that leaves random streams alone that the call has not drawn from."""
        if self.start is None:
            return self
        return replace(self, start=PassState(self.start.random.trimmed(), self.start.attributes))

    def run(self, model: nn.Module) -> Any:
        """Run the call again, from the state that it started from."""
        if self.start is not None:
            self.start.restore()
        return model(*self.args, **self.kwargs)

    def check_unchanged(self) -> None:
        """Raise if a tensor of the batch was changed in place since :meth:`sealed`."""
        if self.versions and self.versions != self._versions():
            raise ReplayError(
                "the training batch was changed in place by the network or before optimizer.step(), "
                "so it cannot be evaluated again: clone it before changing it"
            )

    def _versions(self) -> tuple[int, ...]:
        return tuple(map(version_of, leaves((self.args, self.kwargs))))


@dataclass(frozen=True)
class Recording:
    """One forward pass of the network and its loss, ready to be run again."""

    calls: tuple[Call, ...]
    loss_args: tuple | None  # of the criterion, slots are filled in; None if the network returns its loss
    loss_kwargs: dict[str, Any]
    slots: tuple[Slot, ...]  # where the outputs go
    autocast: Autocast
    loss: Tensor | None = None  # in training, detached; None if it is not known at the weights of the step
    weight: float | Tensor = 1.0  # of this loss in what was back-propagated: 1/n for n micro-batches
    prediction: Any = None  # what the criterion saw in training, detached; kept only if it is needed
    modes: tuple[tuple[nn.Module, bool], ...] = ()  # whether each module was in training mode
    place: tuple | None = None  # where the weights were, see `place_of`; None if nobody needs to know

    def evaluate(self, model: nn.Module, criterion: Callable | None) -> tuple[Any, Tensor | None]:
        """Run the network and the criterion again.

        Returns:
            What the criterion saw, and the loss (None if the recording has no targets).
        """
        with self.autocast.active():
            outputs = [call.run(model) for call in self.calls]
            if criterion is None:
                return own_prediction(outputs[0]), own_loss(outputs[0])
            values = [slot.take(outputs) for slot in self.slots]
            prediction = values[0] if len(values) == 1 else tuple(values)
            return prediction, None if self.loss_args is None else self.loss_of(criterion, prediction)

    def loss_of(self, criterion: Callable, prediction: Any) -> Tensor:
        """Return the loss of another prediction; all other arguments of the criterion are as they were."""
        assert self.loss_args is not None
        args, kwargs = list(self.loss_args), dict(self.loss_kwargs)
        values = (prediction,) if len(self.slots) == 1 else prediction
        for slot, value in zip(self.slots, values, strict=True):
            if isinstance(slot.position, str):
                kwargs[slot.position] = value
            else:
                args[slot.position] = value
        return criterion(*args, **kwargs)

    @property
    def target(self) -> Any:
        """The criterion's first argument that is not an output of the network, or None."""
        if self.loss_args is None:
            return None
        taken = {slot.position for slot in self.slots}
        rest = [value for index, value in enumerate(self.loss_args) if index not in taken]
        rest += [value for name, value in self.loss_kwargs.items() if name not in taken]
        return next((value for value in rest if value is not None), None)

    def starting_from(self, start: PassState, weight: float | Tensor) -> Recording:
        """Return a copy in which every call of the network starts from this state, and the loss has this weight."""
        calls = [Call(call.args, call.kwargs, start) for call in self.calls]
        return replace(self, calls=tuple(calls), weight=weight)

    def ended(
        self, loss: Tensor, prediction: Any, place: tuple | None, *, weight: float = 1.0, modes: tuple = ()
    ) -> Recording:
        """Return a copy that knows the loss; random streams that the pass has not drawn from are left out."""
        calls = tuple(call.ended() for call in self.calls)
        return replace(self, calls=calls, loss=loss, prediction=prediction, weight=weight, modes=modes, place=place)

    def stepped_from(self, place: tuple | None) -> Recording:
        """Return a copy that knows the loss only if the weights are where they were: SAM, say, moves them in between.

        The copy has no place: a closure that runs next may move the weights on purpose.
        """
        if self.place is None:
            return self
        if self.place == place:
            return replace(self, place=None)
        return replace(self, place=None, loss=None, prediction=None)

    @property
    def draws_from_host(self) -> bool:
        """Whether the passes drew random numbers from Python or NumPy."""
        return any(call.start is not None and call.start.random.has_host for call in self.calls)

    def depends_on(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether an argument of the criterion, slots apart, was computed from one of these parameters."""
        return any(depends_on(tensor, parameters) for tensor in leaves((self.loss_args, self.loss_kwargs)))

    def settled(self, parameters: Sequence[Tensor]) -> Recording:
        """Return a copy whose arguments are constants: no pass reaches behind them or leaves a gradient in them.

        Args:
            parameters: Those of the optimizer. They stay themselves where they are arguments of the criterion.

        Raises:
            ReplayError: An argument was computed from such parameters, so that it would change with them, or the
                network did not run with its own ones.
        """
        if any(call.is_functional for call in self.calls):
            raise ReplayError(
                "the network ran with other tensors in the place of its parameters (functional_call, as in an inner "
                "loop of MAML), and running it again would not compute these: give apo a module that does so in its "
                "forward and calls the network there"
            )
        calls = [(call.args, call.kwargs) for call in self.calls]
        everything = (calls, self.loss_args, self.loss_kwargs)
        between = [tensor for slot in self.slots for tensor in slot.origin.constants()]
        if any(tensor.grad_fn is not None and depends_on(tensor, parameters) for tensor in between):
            raise ReplayError(
                "a tensor that was computed from parameters is used between network and criterion, so it cannot be "
                f"evaluated at other weights: {EASY_WAY}, or let the network return the result"
            )
        if not all(slot.origin.is_unchanged() for slot in self.slots):
            raise ReplayError(
                "a tensor that is used between network and criterion was changed in place before optimizer.step(), so "
                f"it cannot be evaluated again: clone it, or {EASY_WAY}"
            )
        if not any(tensor.requires_grad for tensor in [*leaves(everything), *between]):
            return self
        self._check_arguments(parameters)
        moved = {id(p) for p in parameters}
        constant = _OnceForEach(lambda t: t if not t.requires_grad or id(t) in moved else t.detach().requires_grad_())
        calls, loss_args, loss_kwargs = tree_map(constant, everything)
        pairs = zip(self.calls, calls, strict=True)
        own = tuple(replace(call, args=args, kwargs=kwargs) for call, (args, kwargs) in pairs)
        slots = tuple(slot.with_constants(constant) for slot in self.slots)
        return replace(self, calls=own, loss_args=loss_args, loss_kwargs=loss_kwargs, slots=slots)

    def _check_arguments(self, parameters: Sequence[Tensor]) -> None:
        for call in self.calls:
            for name, value in _named(call.args, call.kwargs):
                if any(depends_on(tensor, parameters) for tensor in leaves(value)):
                    raise ReplayError(
                        f"argument {name} of the network is a parameter of the optimizer or was computed from one, and "
                        "running the network again does not repeat that: give apo a module that does both in its "
                        "forward, or detach() the argument"
                    )
        for name, value in _named(self.loss_args or (), self.loss_kwargs):
            computed = (tensor for tensor in leaves(value) if tensor.grad_fn is not None)
            if any(depends_on(tensor, parameters) for tensor in computed):
                raise ReplayError(
                    f"argument {name} of the criterion was computed from the network in a way that cannot be repeated "
                    f"at other weights: {EASY_WAY}, let the network return it as it is, or detach() it"
                )

    def of_another_batch(self, batch: Any, may_have_target: bool) -> Recording:
        """Return a recording of a batch of another source that is evaluated as this one was.

        Args:
            batch: ``(inputs, target)``, or the network's inputs alone.
            may_have_target: Whether a pair is inputs and target.
        """
        if not (may_have_target and isinstance(batch, (tuple, list)) and len(batch) == 2):
            slots = tuple(slot.for_another_batch(slot.position) for slot in self.slots)
            return Recording((as_call(batch),), None, {}, slots, self.autocast)
        inputs, target = batch
        slot = self.slots[0].for_another_batch(0) if self.slots else Slot(0)
        return Recording((as_call(inputs),), (None, target), {}, (slot,), self.autocast)

    def as_inputs(self) -> Recording:
        """Return a copy that owns its tensors, without random state and training loss: a batch for the FSD term."""
        own = _OnceForEach(lambda t: t.detach().clone().requires_grad_(t.requires_grad))
        calls = tuple(Call(tree_map(own, call.args), tree_map(own, call.kwargs)) for call in self.calls)
        loss_args, loss_kwargs, weight = tree_map(own, (self.loss_args, self.loss_kwargs, self.weight))
        slots = tuple(slot.with_constants(own) for slot in self.slots)
        return Recording(calls, loss_args, loss_kwargs, slots, self.autocast, weight=weight)

    def state_dict(self) -> dict[str, Any]:
        """Return what ``torch.load(weights_only=True)`` accepts if the arguments are plain, see :func:`odd_type`."""
        return {
            "calls": [(call.args, call.kwargs) for call in self.calls],
            "loss_args": self.loss_args,
            "loss_kwargs": self.loss_kwargs,
            "slots": [slot.state_dict() for slot in self.slots],
            "autocast": (self.autocast.device_type, self.autocast.enabled, self.autocast.dtype),
            "weight": self.weight,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], device: torch.device) -> Recording:
        """Read back what :meth:`state_dict` returned, with its tensors on ``device``."""
        state = tree_map(lambda tensor: tensor.detach().to(device).requires_grad_(tensor.requires_grad), state)
        return cls(
            calls=tuple(Call(tuple(args), kwargs) for args, kwargs in state["calls"]),
            loss_args=None if state["loss_args"] is None else tuple(state["loss_args"]),
            loss_kwargs=state["loss_kwargs"],
            slots=tuple(map(Slot.from_state_dict, state["slots"])),
            autocast=Autocast(*state["autocast"]),
            weight=state.get("weight", 1.0),
        )


class _OnceForEach:
    """Apply a function once to each tensor: one that is in two places is one tensor again.

    The loop may differentiate an output by an input that it has given to the network.

    Example:
        >>> once, tensor = _OnceForEach(Tensor.clone), torch.zeros(1)
        >>> once(tensor) is once(tensor), once(tensor) is tensor
        (True, False)
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function
        self._done: dict[int, tuple[Tensor, Tensor]] = {}  # the first keeps its id from being used again

    def __call__(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._done:
            self._done[id(tensor)] = tensor, self._function(tensor)
        return self._done[id(tensor)][1]


def as_arguments(inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """Turn a batch's inputs into arguments: a mapping into keywords, a tuple or list into positions, else just one."""
    if isinstance(inputs, Tensor):  # known at once; asking whether something is a mapping takes longer
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


def as_call(inputs: Any) -> Call:
    """Turn a batch's inputs into a call of the network."""
    return Call(*as_arguments(inputs))


def own_loss(output: Any) -> Tensor:
    """Return the loss that a network computed itself.

    It is ``output.loss`` or ``output["loss"]``, or the only number in a tuple such as nanoGPT's ``(logits, loss)``.

    Raises:
        ReplayError: There is none.
    """
    if isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        numbers = [item for item in output if _is_number(item)]
        loss = numbers[0] if len(numbers) == 1 else None
    else:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        lacks = "is the loss without the outputs, which apo compares" if _is_number(output) else "has no entry 'loss'"
        raise ReplayError(
            f"no loss function was given and the network's output, a {type(output).__name__}, {lacks}: "
            "pass criterion=, or let the network return its outputs and its loss, as in (logits, loss)"
        )
    return loss


def own_prediction(output: Any) -> Any:
    """Return what a network that computes its own loss returned beside it and beside other numbers, such as its parts.

    These are None in a tuple, and left out of a mapping, unless that names its logits.
    """
    if isinstance(output, Mapping):
        has_numbers = "logits" not in output and any(_is_number(item) for item in output.values())
        return {key: item for key, item in output.items() if not _is_number(item)} if has_numbers else output
    if not isinstance(output, (tuple, list)) or hasattr(output, "loss"):
        return output
    return tuple(None if _is_number(item) else item for item in output)


def _is_functional(modules: Sequence[nn.Module]) -> bool:
    """Return whether trainable tensors stand in the place of modules' parameters, as inside ``functional_call``."""
    own = (p for module in modules for p in own_parameters(module).values() if p is not None)
    return any(p.requires_grad and not isinstance(p, nn.Parameter) for p in own)


def _is_number(item: Any) -> bool:
    return isinstance(item, Tensor) and item.ndim == 0 and item.is_floating_point()


def _named(args: tuple, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give every argument a name for messages: positions are counted from one."""
    yield from ((str(index), value) for index, value in enumerate(args, start=1))
    yield from ((repr(name), value) for name, value in kwargs.items())
