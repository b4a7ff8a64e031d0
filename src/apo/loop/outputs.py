"""Following the network's outputs to the criterion, through whatever the loop does to them in between.

From the end of a recorded forward pass on, the output tensors are of a class of their own, :class:`_Followed`: each of
torch's functions that is called on one of them is noted, with its arguments, and its result is followed as well. When
the criterion is called, its arguments are known: an output, a reshape of one, or an :class:`Operation` that can be run
again at other weights. A function that draws random numbers or changes one of its arguments cannot be, so its result is
not followed; the recording then says so.

Only their class tells such tensors from others: they are the same objects as before, in the same containers, and plain
again while the criterion runs and after the step. Nothing here keeps a tensor, or the batch it came from, alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from apo.passes.operations import Operation, Output, Slot, leaves, tree_map, with_paths
from apo.passes.recording import Call
from apo.torch_internals import version_of, without_torch_function

__all__ = ["Outputs"]


@dataclass(frozen=True)
class _Entry:
    """A tensor that is followed: where it comes from, and its version counter then."""

    reference: weakref.ref[Tensor]
    origin: Output | Operation
    version: int

    def tensor(self) -> Tensor | None:
        """Return the tensor, unless it is gone or was changed in place, which no replay would repeat."""
        tensor = self.reference()
        return tensor if tensor is not None and version_of(tensor) == self.version else None


class Outputs:
    """The outputs of one network since the last step, and what was made of them.

    Attributes:
        calls: How often the network was called.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._entries: dict[int, _Entry] = {}
        self._opaque: list[tuple[Output, Any]] = []  # outputs in which no tensor was found
        self._at_rest: list[Tensor] = []
        _FOLLOWING.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Outputs:
        """Start without any: a copy of the network has not been called."""
        return Outputs()

    def add(self, call: Call, value: Any) -> None:
        """Follow what a call of the network returned."""
        found = list(with_paths(value))
        if not found:
            self._opaque.append((Output(call, (), self.calls), value))
        for path, tensor in found:
            self._follow(tensor, Output(call, path, self.calls, (type(value), len(found))))
        self.calls += 1

    def rest(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Let arguments of the criterion be plain tensors while it runs."""
        for tensor in leaves((args, kwargs)):
            if type(tensor) is _Followed:
                _make_plain(tensor)
                self._at_rest.append(tensor)

    def wake(self) -> None:
        """Follow the arguments of the criterion again."""
        for tensor in self._at_rest:
            tensor.__class__ = _Followed
        self._at_rest = []

    def forget(self) -> None:
        """Leave all tensors as they would be without apo."""
        if not self.calls:  # as at most steps
            return
        self._at_rest = []
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            tensor = entry.reference()
            if tensor is not None and not any(other.knows(tensor) for other in _FOLLOWING):
                _make_plain(tensor)
        self._opaque, self.calls = [], 0

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor is followed, changed in place or not."""
        entry = self._entries.get(id(tensor))
        return entry is not None and entry.reference() is tensor

    def slots(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple[Call, ...], tuple[Slot, ...]]:
        """Find which arguments of the criterion come from the network; return the calls and where their outputs go."""
        sources = []
        used: dict[tuple[int, int], Call] = {}
        for position, value in [*enumerate(args), *kwargs.items()]:
            origin, shape = self._source(value)
            if origin is not None:
                sources.append((position, origin, shape))
                used |= {(output.order, id(output.call)): output.call for output in origin.outputs()}
        calls = [used[key] for key in sorted(used)]
        number = {id(call): index for index, call in enumerate(calls)}

        def bound(output: Output) -> Output:
            return Output(number[id(output.call)], output.path)

        return tuple(calls), tuple([Slot(at, origin.mapped(bound, None), shape) for at, origin, shape in sources])

    def note(self, function: Callable, args: tuple, kwargs: dict, results: list[tuple[int | None, Tensor]]) -> None:
        """Follow the results of a function if an argument of it is followed."""
        spoilt: list[Tensor] = []
        traced: list[Tensor] = []

        def node(tensor: Tensor) -> Any:
            if not self.knows(tensor):
                return tensor
            entry = self._entries[id(tensor)]
            (spoilt if entry.tensor() is None else traced).append(tensor)
            return entry.origin

        own_args, own_kwargs = tree_map(node, (args, kwargs))
        if traced and not spoilt:
            for item, result in results:
                if not self.knows(result):
                    self._follow(result, Operation(function, own_args, own_kwargs, item).sealed())

    def _follow(self, tensor: Tensor, origin: Output | Operation) -> None:
        key, entries = id(tensor), self._entries
        reference = weakref.ref(tensor, lambda gone: entries.pop(key, None))
        entries[key] = _Entry(reference, origin, version_of(tensor))
        if type(tensor) is Tensor and tensor.grad_fn is not None:
            tensor.__class__ = _Followed

    def _source(self, value: Any) -> tuple[Output | Operation | None, tuple[int, ...] | None]:
        """Return what an argument of the criterion is, and the shape to which an output was reshaped."""
        if not isinstance(value, Tensor):
            return self._whole(value), None
        origin = self._origin_of(value)
        if isinstance(origin, Output) or (origin is None and self.knows(value)):
            return origin, None
        for entry in reversed(list(self._entries.values())):  # the last outputs first
            output, tensor = entry.origin, entry.tensor()
            if isinstance(output, Output) and tensor is not None and _is_reshape(value, tensor):
                return output, tuple(int(size) for size in value.shape)
        return origin, None

    def _whole(self, value: Any) -> Output | None:
        """Return the output of a call if ``value`` is all that the call returned."""
        for output, whole in reversed(self._opaque):
            if whole is value:
                return output
        found = list(with_paths(value))
        origins = [self._origin_of(tensor) for _, tensor in found]
        first = origins[0] if origins else None
        if not isinstance(first, Output) or first.whole != (type(value), len(found)):
            return None
        pairs = zip(origins, found, strict=True)
        same = all(isinstance(o, Output) and o.call is first.call and o.path == path for o, (path, _) in pairs)
        return replace(first, path=()) if same else None

    def _origin_of(self, tensor: Tensor) -> Output | Operation | None:
        """Return where a tensor comes from, unless that is unknown or the tensor was changed in place."""
        entry = self._entries.get(id(tensor))
        return entry.origin if entry is not None and entry.tensor() is tensor else None


#: All that follow outputs now: two optimizers of one network each have their own.
_FOLLOWING: weakref.WeakSet[Outputs] = weakref.WeakSet()


class _Followed(Tensor):
    """A tensor of which it is noted what is made of it."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Call a function, and follow its results."""
        kwargs = kwargs or {}
        with without_torch_function():
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return func(*args, **kwargs)
            arguments = leaves((args, kwargs))
            versions = [version_of(tensor) for tensor in arguments]
            random = _random_state(arguments)
            result = func(*args, **kwargs)
            results = [(item, part) for item, part in _parts(result) if part.requires_grad and part.grad_fn is not None]
            if not results:
                return result
            is_pure = not _moves_statistics(func, args, kwargs) and versions == list(map(version_of, arguments))
            if is_pure and all(map(torch.equal, random, _random_state(arguments))):
                for following in list(_FOLLOWING):
                    following.note(func, args, kwargs, results)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _moves_statistics(function: Callable, args: tuple, kwargs: dict) -> bool:
    """Return whether this is a normalization that updates its running statistics, past their version counters."""
    if function not in _NORMALIZATIONS:
        return False
    name, default = _NORMALIZATIONS[function]
    names = ("input", "running_mean", "running_var", "weight", "bias", name)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given.get("running_mean") is not None and bool(given.get(name, default))


#: The argument that says whether statistics of the batch are used, and its default.
_NORMALIZATIONS: dict[Callable, tuple[str, bool]] = {
    functional.batch_norm: ("training", False),
    functional.instance_norm: ("use_input_stats", True),
}


def _parts(result: Any) -> list[tuple[int | None, Tensor]]:
    if isinstance(result, Tensor):
        return [(None, result)]
    if isinstance(result, (tuple, list)):
        return [(item, part) for item, part in enumerate(result) if isinstance(part, Tensor)]
    return []


def _random_state(tensors: list[Tensor]) -> list[Tensor]:
    devices = {tensor.get_device() for tensor in tensors if tensor.is_cuda}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in sorted(devices))]


def _make_plain(tensor: Tensor) -> None:
    if type(tensor) is _Followed:
        tensor.__class__ = Tensor  # type: ignore[assignment]


def _is_reshape(value: Tensor, leaf: Tensor) -> bool:
    if value.requires_grad != leaf.requires_grad:
        return False  # a detached output is a constant, such as the target of a stop-gradient
    same_memory = value.data_ptr() == leaf.data_ptr() and value.numel() == leaf.numel() and value.numel() > 0
    return same_memory and value.is_contiguous() and leaf.is_contiguous() and value.dtype == leaf.dtype
