"""What happened to an output of the network before the criterion saw it, as data that can be run again.

A loop may transpose, slice, mask, scale or cast the network's output. Each such step is a call of one of torch's
functions. An :class:`Operation` holds the function and its arguments, in which other operations and outputs of the
network (:class:`Output`) stand for what they returned; all other arguments are constants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.overrides import get_overridable_functions, resolve_name

from apo.torch_internals import version_of

__all__ = ["Operation", "Output", "as_plain", "from_plain", "pick"]


@dataclass(frozen=True)
class Output:
    """A tensor that a call of the network returned.

    Attributes:
        call: The call; its index, in a recording.
        path: Keys into the structure of what it returned.
        order: Which of the calls of this iteration it was.
        whole: The type of what the call returned, and how many tensors there are in it.
    """

    call: Any
    path: tuple[int | str, ...] = ()
    order: int = 0
    whole: tuple[type, int] = (Tensor, 1)

    def run(self, outputs: Sequence[Any]) -> Any:
        """Take the tensor out of what the calls returned."""
        return pick(outputs[self.call], self.path)

    def outputs(self) -> Iterator[Output]:
        """Yield the outputs of the network that this is made of."""
        yield self

    def mapped(self, on_output: Callable[[Output], Output], on_tensor: Any) -> Output:
        """Return a copy with other outputs."""
        return on_output(self)


@dataclass(frozen=True, eq=False)
class Operation:
    """A call of one of torch's functions.

    Attributes:
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        item: Which of several results it is; None if there is one.
        versions: The version counters of its constants, to notice those that were changed in place since.
    """

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    item: int | None = None
    versions: tuple[int, ...] = ()

    def sealed(self) -> Operation:
        """Return a copy that knows the version counters of its constants."""
        return replace(self, versions=self._own_versions())

    def run(self, outputs: Sequence[Any]) -> Any:
        """Call the function again on what the network returned now."""
        args, kwargs = _map_leaves((self.args, self.kwargs), lambda node: node.run(outputs), _same)
        result = self.function(*args, **kwargs)
        return result if self.item is None else result[self.item]

    def outputs(self) -> Iterator[Output]:
        """Yield the outputs of the network that this is made of, some perhaps twice."""
        for node in _nodes((self.args, self.kwargs)):
            yield from node.outputs()

    def constants(self) -> Iterator[Tensor]:
        """Yield all tensors that are not computed from outputs of the network."""
        yield from self._own_constants()
        for node in _nodes((self.args, self.kwargs)):
            if isinstance(node, Operation):
                yield from node.constants()

    def is_unchanged(self) -> bool:
        """Return whether no constant was changed in place since :meth:`sealed`."""
        inside = (node for node in _nodes((self.args, self.kwargs)) if isinstance(node, Operation))
        same = not self.versions or self.versions == self._own_versions()
        return same and all(node.is_unchanged() for node in inside)

    def mapped(self, on_output: Callable[[Output], Output], on_tensor: Callable[[Tensor], Tensor] | None) -> Operation:
        """Return a copy with other outputs and, if asked for, other constants, whose versions are not known."""
        tree = (self.args, self.kwargs)
        args, kwargs = _map_leaves(tree, lambda node: node.mapped(on_output, on_tensor), on_tensor or _same)
        return replace(self, args=args, kwargs=kwargs, versions=self.versions if on_tensor is None else ())

    def _own_versions(self) -> tuple[int, ...]:
        # Parameters are meant to be changed, by optimizers.
        return tuple(version_of(t) for t in self._own_constants() if not (t.is_leaf and t.requires_grad))

    def _own_constants(self) -> list[Tensor]:
        found: list[Tensor] = []
        _map_leaves((self.args, self.kwargs), _same, found.append)
        return found


def pick(value: Any, path: Sequence[int | str]) -> Any:
    """Follow keys, positions and attribute names into a structure.

    Example:
        >>> pick({"a": (1, 2)}, ("a", 1))
        2
    """
    for key in path:
        value = getattr(value, key) if isinstance(key, str) and not isinstance(value, Mapping) else value[key]
    return value


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


def _same(leaf: Any) -> Any:
    return leaf


def _nodes(tree: Any) -> list[Any]:
    found: list[Any] = []
    _map_leaves(tree, found.append, _same)
    return found


def _map_leaves(tree: Any, on_node: Callable[[Any], Any], on_tensor: Callable[[Any], Any]) -> Any:
    """Rebuild nested tuples, lists and dicts with other nodes and tensors in them."""
    if isinstance(tree, (Output, Operation)):
        return on_node(tree)
    if isinstance(tree, Tensor):
        return on_tensor(tree)
    return _rebuilt(tree, lambda item: _map_leaves(item, on_node, on_tensor))
