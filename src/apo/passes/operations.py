"""Structures of tensors, and what happened to an output of the network before the criterion saw it.

Networks and criteria take and return nested tuples, lists and mappings of tensors.

A loop may transpose, slice, mask, scale or cast the network's output. Each such step is a call of one of torch's
functions. An :class:`Operation` holds the function and its arguments, in which other operations and outputs of the
network (:class:`Output`) stand for what they returned; all other arguments are constants. So it is data that can be run
again, and saved. A :class:`Slot` is an argument of the criterion that is made in this way.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions, resolve_name

from apo.distributed import is_sharded
from apo.errors import ReplayError
from apo.torch_internals import version_of

__all__ = [
    "EASY_WAY", "Operation", "Output", "Slot", "as_plain", "from_plain", "leaves", "odd_type", "tree_map",
    "with_paths",
]  # fmt: skip

#: What to do about something between network and criterion that cannot be run again.
EASY_WAY = "move what is between network and criterion into the criterion, criterion = apo.criterion(your_function)"
#: What ``torch.load(weights_only=True)`` accepts, beside tensors and containers.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def tree_map(function: Callable[[Any], Any], tree: Any, kinds: type | tuple[type, ...] = Tensor) -> Any:
    """Apply ``function`` to all tensors, or all of other kinds, in nested tuples, lists and mappings; keep the rest."""
    if isinstance(tree, kinds):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        # Not through the constructor: that of a PackedSequence takes other arguments than its fields.
        return type(tree)._make(tree_map(function, item, kinds) for item in tree)  # type: ignore[attr-defined]
    if isinstance(tree, (tuple, list)):
        return type(tree)(tree_map(function, item, kinds) for item in tree)
    if isinstance(tree, Mapping):
        return _mapping_like(tree, {key: tree_map(function, value, kinds) for key, value in tree.items()})
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


def leaves(tree: Any, kinds: type | tuple[type, ...] = Tensor) -> list[Any]:
    """Return all tensors in a structure, or all of other kinds.

    Example:
        >>> leaves(({"a": 1}, [2.0, "b"]), (int, str))
        [1, 'b']
    """
    if isinstance(tree, kinds):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [leaf for item in tree for leaf in leaves(item, kinds)]
    # A dict is known at once; asking whether something is a mapping takes longer, and every batch is asked.
    if isinstance(tree, (dict, Mapping)):
        return [leaf for item in tree.values() for leaf in leaves(item, kinds)]
    return []


def with_paths(
    output: Any, path: tuple[int | str, ...] = (), in_object: bool = False
) -> Iterator[tuple[tuple[int | str, ...], Tensor]]:
    """Walk a structure. Objects in objects are not entered: they may refer to one another."""
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from with_paths(value, (*path, key), in_object)
    elif isinstance(output, (tuple, list)):
        for index, value in enumerate(output):
            yield from with_paths(value, (*path, index), in_object)
    elif not in_object:
        for name, value in _attributes(output).items():
            yield from with_paths(value, (*path, name), in_object=True)


def _attributes(output: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass or another object that a network returned."""
    if dataclasses.is_dataclass(output):
        return {field.name: getattr(output, field.name, None) for field in dataclasses.fields(output)}
    return {} if isinstance(output, nn.Module) else getattr(output, "__dict__", {})


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


def depends_on(tensor: Tensor, parameters: Sequence[Tensor]) -> bool:
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


@dataclass(frozen=True)
class Output:
    """A tensor that a call of the network returned.

    Example:
        >>> Output(0, ("a", 1)).run([{"a": (1, 2)}])
        2
    """

    call: Any  # its index, in a recording
    path: tuple[int | str, ...] = ()  # keys into the structure of what it returned
    order: int = 0  # which of the calls of this iteration it was
    whole: tuple[type, int] = (Tensor, 1)  # the type of what the call returned, and how many tensors there are in it

    def run(self, outputs: Sequence[Any]) -> Any:
        """Take the tensor out of what the calls returned: follow keys, positions and attribute names."""
        value = outputs[self.call]
        for key in self.path:
            value = getattr(value, key) if isinstance(key, str) and not isinstance(value, Mapping) else value[key]
        return value

    def outputs(self) -> Iterator[Output]:
        """Yield the outputs of the network that this is made of."""
        yield self

    def constants(self) -> list[Tensor]:
        """Return no tensors: nothing was computed."""
        return []

    def is_unchanged(self) -> bool:
        """Return True: there is no constant that could have changed."""
        return True

    def mapped(self, on_output: Callable[[Output], Output], on_tensor: Any) -> Output:
        """Return a copy with other outputs."""
        return on_output(self)


@dataclass(frozen=True, eq=False)
class Operation:
    """A call of one of torch's functions."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    item: int | None = None  # which of several results it is; None if there is one
    versions: tuple[int, ...] = ()  # version counters of its constants, to notice those that were changed in place

    def sealed(self) -> Operation:
        """Return a copy that knows the version counters of its constants."""
        return replace(self, versions=self._own_versions())

    def run(self, outputs: Sequence[Any]) -> Any:
        """Call the function again on what the network returned now."""
        args, kwargs = tree_map(lambda node: node.run(outputs), (self.args, self.kwargs), (Output, Operation))
        result = self.function(*args, **kwargs)
        return result if self.item is None else result[self.item]

    def outputs(self) -> Iterator[Output]:
        """Yield the outputs of the network that this is made of, some perhaps twice."""
        for node in self._inside((Output, Operation)):
            yield from node.outputs()

    def constants(self) -> list[Tensor]:
        """Return all tensors that are not computed from outputs of the network."""
        inside = [tensor for operation in self._inside(Operation) for tensor in operation.constants()]
        return self._inside(Tensor) + inside

    def is_unchanged(self) -> bool:
        """Return whether no constant was changed in place since :meth:`sealed`."""
        same = not self.versions or self.versions == self._own_versions()
        return same and all(operation.is_unchanged() for operation in self._inside(Operation))

    def mapped(self, on_output: Callable[[Output], Output], on_tensor: Callable[[Tensor], Tensor] | None) -> Operation:
        """Return a copy with other outputs and, if asked for, other constants, whose versions are not known."""

        def on_leaf(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf if on_tensor is None else on_tensor(leaf)
            return leaf.mapped(on_output, on_tensor)

        args, kwargs = tree_map(on_leaf, (self.args, self.kwargs), (Output, Operation, Tensor))
        return replace(self, args=args, kwargs=kwargs, versions=self.versions if on_tensor is None else ())

    def _own_versions(self) -> tuple[int, ...]:
        # Parameters are meant to be changed, by optimizers.
        return tuple(version_of(t) for t in self._inside(Tensor) if not (t.is_leaf and t.requires_grad))

    def _inside(self, kinds: type | tuple[type, ...]) -> list[Any]:
        return leaves((self.args, self.kwargs), kinds)


@dataclass(frozen=True)
class Slot:
    """A place among the criterion's arguments that takes an output of the network, or what was made of it."""

    position: int | str  # index of the positional argument, or name of the keyword argument
    origin: Output | Operation = Output(0)  # what goes there
    shape: tuple[int, ...] | None = None  # to which that was reshaped, with the leading size left open

    def take(self, outputs: list[Any]) -> Any:
        """Make this slot's value from the outputs of the calls."""
        value = self.origin.run(outputs)
        return value if self.shape is None else value.reshape(-1, *self.shape[1:])

    def with_constants(self, function: Callable[[Tensor], Tensor]) -> Slot:
        """Return a copy in which other tensors take part in the operation."""
        return replace(self, origin=self.origin.mapped(lambda output: output, function))

    def for_another_batch(self, position: int | str) -> Slot:
        """Return the slot for a batch of another source, which calls the network once.

        Raises:
            ReplayError: A tensor takes part that may belong to this batch.
        """
        origin = self.origin
        if isinstance(origin, Operation) and (origin.constants() or any(output.call for output in origin.outputs())):
            raise ReplayError(
                "fsd_batch must be 'previous' or 'same' where a tensor of the batch, such as a mask, is used between "
                f"network and criterion, got batches of another source: {EASY_WAY}"
            )
        return replace(self, position=position, origin=origin.mapped(lambda output: Output(0, output.path), None))

    def state_dict(self) -> tuple:
        """Return plain data, in the form of the first files: call and path of an output stand apart from the rest."""
        if isinstance(self.origin, Output):
            return self.position, self.origin.call, self.origin.path, self.shape, None
        return self.position, next(self.origin.outputs()).call, (), self.shape, as_plain(self.origin)

    @classmethod
    def from_state_dict(cls, state: Sequence) -> Slot:
        """Read back what :meth:`state_dict` returned."""
        position, call, path, shape, *operation = map(from_plain, state)
        origin = operation[0] if operation and operation[0] is not None else Output(call, tuple(path))
        return cls(position, origin, shape)


def as_plain(tree: Any) -> Any:
    """Turn an operation into what ``torch.load(weights_only=True)`` accepts: functions are called by their names."""
    if isinstance(tree, Operation):
        name = resolve_name(tree.function)
        function = name if _functions().get(name or "") == tree.function else tree.function  # a function is not plain
        args, kwargs = as_plain(tree.args), as_plain(tree.kwargs)
        return {_MARK: "operation", "function": function, "args": args, "kwargs": kwargs, "item": tree.item}
    if isinstance(tree, Output):
        return {_MARK: "output", "call": tree.call, "path": tree.path}
    if isinstance(tree, slice):
        return {_MARK: "slice", "ends": [as_plain(end) for end in (tree.start, tree.stop, tree.step)]}
    if tree is ...:
        return {_MARK: "ellipsis"}
    return _rebuilt(tree, as_plain)


def from_plain(tree: Any) -> Any:
    """Read back what :func:`as_plain` returned.

    Raises:
        KeyError: It names a function that is not one of torch's for tensors; a file may call no other.
    """
    kind = tree.get(_MARK) if type(tree) is dict else None
    if kind == "operation":
        args, kwargs = from_plain(tree["args"]), from_plain(tree["kwargs"])
        return Operation(_functions()[tree["function"]], args, kwargs, tree["item"])
    if kind == "output":
        return Output(tree["call"], tuple(tree["path"]))
    if kind == "slice":
        return slice(*(from_plain(end) for end in tree["ends"]))
    return ... if kind == "ellipsis" else _rebuilt(tree, from_plain)


#: What marks a dict as standing for something else.
_MARK = "apo"


@functools.cache
def _functions() -> dict[str, Callable]:
    """Return torch's functions of tensors by their names."""
    every = (function for functions in get_overridable_functions().values() for function in functions)
    return {name: function for function in every if (name := resolve_name(function))}


def _rebuilt(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the items of a plain container."""
    if type(tree) in (tuple, list):
        return type(tree)(function(item) for item in tree)
    if type(tree) is dict:
        return {key: function(value) for key, value in tree.items()}
    return tree
