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

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from apo.distributed import is_sharded
from apo.errors import ReplayError
from apo.passes.isolation import RandomState
from apo.torch_internals import version_of

__all__ = ["Autocast", "Call", "Recording", "Slot", "as_call", "odd_type", "own_loss", "tree_map"]

#: What ``torch.load(weights_only=True)`` accepts, beside tensors and containers.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def tree_map(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply ``function`` to every tensor in nested tuples, lists and mappings; keep everything else."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        # Not through the constructor: that of a PackedSequence takes other arguments than its fields.
        return type(tree)._make(tree_map(function, item) for item in tree)  # type: ignore[attr-defined]
    if isinstance(tree, (tuple, list)):
        return type(tree)(tree_map(function, item) for item in tree)
    if isinstance(tree, Mapping):
        return _mapping_like(tree, {key: tree_map(function, value) for key, value in tree.items()})
    return tree


def _mapping_like(pattern: Mapping, items: dict) -> Mapping:
    """Return a mapping of the pattern's type with other values under its keys, or a plain dict if there is no way."""
    if type(pattern) is dict or not isinstance(pattern, (dict, UserDict)):
        return items  # a copy of any other kind of mapping might share its memory with the pattern
    try:
        twin = copy.copy(pattern)
        for key, value in items.items():
            twin[key] = value
            if key in vars(twin):  # where entries are attributes as well
                vars(twin)[key] = value
    except Exception:  # a type that cannot be copied or written to
        return items
    return twin


def odd_type(tree: Any) -> type | None:
    """Return the type of something that ``torch.load(weights_only=True)`` would refuse, or None if all is plain data.

    Example:
        >>> odd_type({"a": (1, [torch.zeros(2)])}), odd_type([range(3)])
        (None, <class 'range'>)
    """
    kind = type(tree)
    if kind in _PLAIN or kind in (Tensor, nn.Parameter):
        return None
    if kind in (tuple, list):
        inside = tree
    elif kind in (dict, OrderedDict):
        inside = [*tree.keys(), *tree.values()]
    else:
        return kind
    return next((odd for item in inside if (odd := odd_type(item)) is not None), None)


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
        """Enter this state.

        Autocast caches the 16-bit copies of the weights until its outermost region ends. The weights move before and
        after, so the cache is emptied: a stale copy would silently evaluate the network at other weights. (Switching
        the cache off instead would make a compiled network compile once more.)
        """
        torch.clear_autocast_cache()
        try:
            with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled):
                yield
        finally:
            torch.clear_autocast_cache()


@dataclass(frozen=True)
class Call:
    """The arguments of one call of the network, with the random state it started from (None: the current one).

    ``versions`` are the version counters of its tensors, to notice a batch that was changed in place.
    """

    args: tuple
    kwargs: dict[str, Any]
    random_state: RandomState | None = None
    versions: tuple[int, ...] = ()

    def sealed(self, random_state: RandomState) -> Call:
        """Note the random state that the call starts from, and the version counters of all tensors."""
        return replace(self, random_state=random_state, versions=self._versions())

    def check_unchanged(self) -> None:
        """Raise if a tensor of the batch was changed in place since :meth:`sealed`."""
        if self.versions and self.versions != self._versions():
            raise ReplayError(
                "the training batch was changed in place by the network or before optimizer.step(), "
                "so it cannot be evaluated again: clone it before changing it"
            )

    def _versions(self) -> tuple[int, ...]:
        return tuple(map(version_of, _tensors((self.args, self.kwargs))))


@dataclass(frozen=True)
class Slot:
    """A place among the criterion's arguments that takes an output of the network.

    Attributes:
        position: Index of the positional argument, or name of the keyword argument.
        call: Which call of the network the output comes from.
        path: Keys into the structure of that output.
        shape: Shape to which the output was reshaped, with the leading size left open; None if it was not reshaped.
    """

    position: int | str
    call: int = 0
    path: tuple[int | str, ...] = ()
    shape: tuple[int, ...] | None = None

    def take(self, outputs: list[Any]) -> Any:
        """Pick this slot's value out of the outputs of the calls."""
        value = outputs[self.call]
        for key in self.path:
            value = getattr(value, key) if isinstance(key, str) and not isinstance(value, Mapping) else value[key]
        return value if self.shape is None else value.reshape(-1, *self.shape[1:])


@dataclass(frozen=True)
class Recording:
    """One forward pass of the network and its loss, ready to be run again.

    Attributes:
        calls: The calls of the network.
        loss_args: Positional arguments of the criterion; slots are filled in. None if the network returns its loss.
        loss_kwargs: Keyword arguments of the criterion.
        slots: Where the outputs go.
        autocast: Precision of the forward pass.
        loss: Value of the loss in training, detached.
        weight: Factor of this loss in what was back-propagated (1/n for n accumulated micro-batches).
        prediction: What the criterion saw in training, detached; kept only if it is needed.
        modes: The modules of network and criterion, and whether each was in training mode.
    """

    calls: tuple[Call, ...]
    loss_args: tuple | None
    loss_kwargs: dict[str, Any]
    slots: tuple[Slot, ...]
    autocast: Autocast
    loss: Tensor | None = None
    weight: float | Tensor = 1.0
    prediction: Any = None
    modes: tuple[tuple[nn.Module, bool], ...] = ()

    def evaluate(self, model: nn.Module, criterion: Callable | None) -> tuple[Any, Tensor | None]:
        """Run the network and the criterion again.

        Returns:
            What the criterion saw, and the loss (None if the recording has no targets).
        """
        with self.autocast.active():
            outputs = []
            for call in self.calls:
                if call.random_state is not None:
                    call.random_state.restore()
                outputs.append(model(*call.args, **call.kwargs))
            if criterion is None:
                return outputs[0], own_loss(outputs[0])
            filled = [(slot.position, slot.take(outputs)) for slot in self.slots]
            prediction = filled[0][1] if len(filled) == 1 else tuple(value for _, value in filled)
            if self.loss_args is None:
                return prediction, None
            args, kwargs = list(self.loss_args), dict(self.loss_kwargs)
            for position, value in filled:
                if isinstance(position, str):
                    kwargs[position] = value
                else:
                    args[position] = value
            return prediction, criterion(*args, **kwargs)

    @property
    def target(self) -> Any:
        """The criterion's first argument that is not an output of the network, or None."""
        if self.loss_args is None:
            return None
        taken = {slot.position for slot in self.slots}
        rest = [value for index, value in enumerate(self.loss_args) if index not in taken]
        rest += [value for name, value in self.loss_kwargs.items() if name not in taken]
        return next((value for value in rest if value is not None), None)

    def with_random_state(self, random_state: RandomState) -> Recording:
        """Return a copy in which every call of the network starts from this random state."""
        return replace(self, calls=tuple(replace(call, random_state=random_state) for call in self.calls))

    def ended(self, loss: Tensor, prediction: Any = None, weight: float | Tensor = 1.0, modes: tuple = ()) -> Recording:
        """Return a copy that knows the loss; random streams that the pass has not drawn from are left out."""
        calls = [
            call if call.random_state is None else replace(call, random_state=call.random_state.trimmed())
            for call in self.calls
        ]
        return replace(self, calls=tuple(calls), loss=loss, prediction=prediction, weight=weight, modes=modes)

    @property
    def draws_from_host(self) -> bool:
        """Whether the passes drew random numbers from Python or NumPy."""
        return any(call.random_state is not None and call.random_state.has_host for call in self.calls)

    def depends_on(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether an argument of the criterion, slots apart, was computed from one of these parameters."""
        return any(_depends_on(tensor, parameters) for tensor in _tensors((self.loss_args, self.loss_kwargs)))

    def settled(self, parameters: Sequence[Tensor]) -> Recording:
        """Return a copy whose arguments are constants: no pass reaches behind them or leaves a gradient in them.

        Args:
            parameters: Those of the optimizer. They stay themselves where they are arguments of the criterion.

        Raises:
            ReplayError: An argument was computed from such parameters, so that it would change with them.
        """
        calls = [(call.args, call.kwargs) for call in self.calls]
        everything = (calls, self.loss_args, self.loss_kwargs)
        if not any(tensor.requires_grad for tensor in _tensors(everything)):
            return self
        self._check_arguments(parameters)
        moved, constants = {id(p) for p in parameters}, {}

        def constant(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad or id(tensor) in moved:
                return tensor
            return constants.setdefault(id(tensor), tensor.detach().requires_grad_())

        calls, loss_args, loss_kwargs = tree_map(constant, everything)
        pairs = zip(self.calls, calls, strict=True)
        own = tuple(replace(call, args=args, kwargs=kwargs) for call, (args, kwargs) in pairs)
        return replace(self, calls=own, loss_args=loss_args, loss_kwargs=loss_kwargs)

    def _check_arguments(self, parameters: Sequence[Tensor]) -> None:
        for call in self.calls:
            for name, value in _named(call.args, call.kwargs):
                if any(_depends_on(tensor, parameters) for tensor in _tensors(value)):
                    raise ReplayError(
                        f"argument {name} of the network is a parameter of the optimizer or was computed from one, and "
                        "running the network again does not repeat that: give apo a module that does both in its "
                        "forward, or detach() the argument"
                    )
        for name, value in _named(self.loss_args or (), self.loss_kwargs):
            computed = (tensor for tensor in _tensors(value) if tensor.grad_fn is not None)
            if any(_depends_on(tensor, parameters) for tensor in computed):
                raise ReplayError(
                    f"argument {name} of the criterion was computed from the network other than by reshaping one of "
                    "its outputs, so it cannot be evaluated at other weights: let the network return it as it is, or "
                    "detach() it"
                )

    def as_inputs(self) -> Recording:
        """Return a copy that owns its tensors, without random state and training loss: a batch for the FSD term."""
        own = lambda tree: tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree)  # noqa: E731
        calls = tuple(Call(own(call.args), own(call.kwargs)) for call in self.calls)
        loss_args = None if self.loss_args is None else own(self.loss_args)
        return Recording(calls, loss_args, own(self.loss_kwargs), self.slots, self.autocast)

    def state_dict(self) -> dict[str, Any]:
        """Return what ``torch.load(weights_only=True)`` accepts if the arguments are plain, see :func:`odd_type`."""
        return {
            "calls": [(call.args, call.kwargs) for call in self.calls],
            "loss_args": self.loss_args,
            "loss_kwargs": self.loss_kwargs,
            "slots": [(slot.position, slot.call, slot.path, slot.shape) for slot in self.slots],
            "autocast": (self.autocast.device_type, self.autocast.enabled, self.autocast.dtype),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], device: torch.device) -> Recording:
        """Read back what :meth:`state_dict` returned, with its tensors on ``device``."""
        state = tree_map(lambda tensor: tensor.detach().to(device).requires_grad_(tensor.requires_grad), state)
        return cls(
            calls=tuple(Call(tuple(args), kwargs) for args, kwargs in state["calls"]),
            loss_args=None if state["loss_args"] is None else tuple(state["loss_args"]),
            loss_kwargs=state["loss_kwargs"],
            slots=tuple(Slot(position, call, tuple(path), shape) for position, call, path, shape in state["slots"]),
            autocast=Autocast(*state["autocast"]),
        )


def as_call(inputs: Any) -> Call:
    """Turn a batch's inputs into a call: a mapping into keywords, a tuple or list into positions, else one argument."""
    if isinstance(inputs, Mapping):
        return Call((), dict(inputs))
    if isinstance(inputs, (tuple, list)):
        return Call(tuple(inputs), {})
    return Call((inputs,), {})


def own_loss(output: Any) -> Tensor:
    """Return the loss that a network computed itself: ``output.loss`` or ``output["loss"]``.

    Raises:
        ReplayError: There is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise ReplayError(
            f"no loss function was given and the network's output, a {type(output).__name__}, has no entry 'loss': "
            "pass loss=/criterion= or let the network return its loss"
        )
    return loss


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(found.append, tree)
    return found


def _named(args: tuple, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give every argument a name for messages: positions are counted from one."""
    yield from ((str(index), value) for index, value in enumerate(args, start=1))
    yield from ((repr(name), value) for name, value in kwargs.items())


def _depends_on(tensor: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Return whether a tensor is one of some parameters or was computed from one; True where that cannot be seen."""
    if tensor.grad_fn is None:
        return any(tensor is parameter for parameter in parameters)
    if any(is_sharded(parameter) for parameter in parameters):
        return True  # the graph leads to weights that were assembled from the shards, not to the parameters
    sought = {id(parameter) for parameter in parameters}
    waiting: list[Any] = [tensor.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # A reentrant checkpoint has no graph of what is inside it.
        if id(getattr(node, "variable", None)) in sought or node.name() == "CheckpointFunctionBackward":
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False
