"""Copies of an optimizer that step on other tensors, to learn what its step does without taking it.

``copy.copy`` of an optimizer keeps ``defaults``, ``state`` and ``param_groups`` alone, since that is what torch
pickles; an optimizer that reads an attribute set by its constructor could not step. A twin has them all.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.errors import NotLinearError
from apo.passes.isolation import RandomState

__all__ = ["SmallTwin", "flat", "full_size_twin", "on_small_twins", "set_rate", "streams", "tensors_in"]

#: Returns a new small copy of an optimizer, and its parameters.
SmallTwin = Callable[[], tuple[Optimizer, list[Tensor]]]
Result = TypeVar("Result")

#: Attributes that a step may change. All others, such as functions and process groups, are shared with the original.
_CHANGEABLE = (Tensor, list, dict, set, deque, Optimizer)
#: More groups of different options than this are rare, and each costs a probe its time.
_PROBED_GROUPS = 4


def twin_of(optimizer: Optimizer, groups: Sequence[dict[str, Any]], stand_ins: Mapping[Tensor, Tensor]) -> Optimizer:
    """Return a copy with other param groups, every attribute, and no state of parameters, no hooks, no schedulers.

    Args:
        optimizer: The original, which is not touched.
        groups: The param groups of the copy.
        stand_ins: The tensor that takes the place of each parameter, wherever an attribute refers to it.
    """
    twin = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(original): stand_in for original, stand_in in stand_ins.items()}
    memo[id(optimizer)] = twin
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            value = OrderedDict()
        elif name in ("state", "param_groups", "step"):  # a scheduler binds a wrapper of step to the original
            continue
        elif isinstance(value, _CHANGEABLE):
            value = copy.deepcopy(value, memo)
        vars(twin)[name] = value
    # Some optimizers keep counts of their own beside the states of the parameters.
    shared: dict[Any, Any] = {
        key: copy.deepcopy(v, memo) for key, v in optimizer.state.items() if not isinstance(key, Tensor)
    }
    twin.state = defaultdict(dict, shared)
    twin.param_groups = list(groups)
    return twin


def small_twin(optimizer: Optimizer, *, with_state: bool = False, wide: bool = True) -> tuple[Optimizer, list[Tensor]]:
    """Return a copy on two small matrices a group, and these matrices.

    Args:
        optimizer: The original.
        with_state: Give it a state of the kind that the original has now, for optimizers that make their state when
            they are built (Adagrad, in older torch); else it has the state of a new optimizer.
        wide: Use float64 for float32, where an optimizer can.
    """
    groups, stand_ins, states = [], {}, {}
    small: list[Tensor] = []
    for group in [group for group in optimizer.param_groups if group["params"]][:_PROBED_GROUPS]:
        first = group["params"][0]
        narrow = not wide or group.get("fused") or first.dtype in (torch.float16, torch.bfloat16)
        matrix = torch.linspace(-1, 1, 12, dtype=torch.float32 if narrow else torch.float64, device=first.device)
        pair = [matrix.reshape(3, 4), matrix.flip(0).reshape(3, 4).clone()]
        small += [p.requires_grad_() for p in pair]
        stand_ins |= dict(zip(group["params"], pair, strict=False))
        groups.append({**copy.deepcopy({key: v for key, v in dict(group).items() if key != "params"}), "params": pair})
        if with_state:
            state = optimizer.state.get(first, {})
            states |= {p: {key: _shrunk(value, first, p) for key, value in state.items()} for p in pair}
        elif "step" in group:
            groups[-1]["step"] = torch.zeros_like(group["step"]) if isinstance(group["step"], Tensor) else 0
    twin = twin_of(optimizer, groups, stand_ins)
    twin.state.update(states)
    return twin, small


def on_small_twins(optimizer: Optimizer, use: Callable[[SmallTwin], Result]) -> Result:
    """Return what a function makes of small copies of the optimizer, of the first kind with which it can step.

    The random streams are left as they were, and the original is not touched.

    Args:
        optimizer: The original.
        use: Called with a function that returns a new copy and its parameters.

    Raises:
        Exception: What the function raises with the first kind, if it raises with all. A :class:`NotLinearError` is
            an answer: no other kind is tried.
    """
    random = streams(optimizer)
    failure: Exception = RuntimeError("there are no parameters")
    for number, options in enumerate(({}, {"with_state": True}, {"wide": False})):
        try:
            return use(functools.partial(small_twin, optimizer, **options))
        except NotLinearError:
            raise
        except Exception as error:
            failure = failure if number else error
        finally:
            random.restore()
    raise failure


def streams(optimizer: Optimizer) -> RandomState:
    """Return the state of the random streams that a step of the optimizer may draw from."""
    return RandomState.capture({p.device for group in optimizer.param_groups for p in group["params"]})


def full_size_twin(optimizer: Optimizer) -> tuple[Optimizer, dict[Tensor, Tensor]]:
    """Return a copy with the same parameters, gradients and state in memory of its own, and each parameter's copy."""
    stand_ins: dict[Tensor, Tensor] = {}
    groups = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            stand_ins[p] = p.detach().clone().requires_grad_(p.requires_grad)
            stand_ins[p].grad = None if p.grad is None else p.grad.detach().clone()
        options = copy.deepcopy({key: value for key, value in dict(group).items() if key != "params"})
        groups.append({**options, "params": [stand_ins[p] for p in group["params"]]})
    twin = twin_of(optimizer, groups, stand_ins)
    memo: dict[int, Any] = {id(p): copied for p, copied in stand_ins.items()}
    for p, copied in stand_ins.items():
        if p in optimizer.state:
            twin.state[copied] = copy.deepcopy(optimizer.state[p], memo)
    return twin, stand_ins


def set_rate(optimizer: Optimizer, rate: float | Callable[[dict[str, Any]], float]) -> None:
    """Write a learning rate into every group, keeping tensors tensors."""
    for group in optimizer.param_groups:
        value = rate(group) if callable(rate) else rate
        group["lr"] = torch.full_like(group["lr"], value) if isinstance(group["lr"], Tensor) else value


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield the tensors and numbers in nested containers, numbers as tensors, each with the way to it."""
    if isinstance(value, Tensor):
        yield path, value.detach()
    elif isinstance(value, bool | int | float | complex):
        yield path, torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64)
    elif isinstance(value, dict):
        for index, (key, inner) in enumerate(value.items()):
            yield from tensors_in(inner, (*path, f"parameter {index}" if isinstance(key, Tensor) else key))
    elif isinstance(value, list | tuple | deque):
        for index, inner in enumerate(value):
            yield from tensors_in(inner, (*path, index))


def flat(vector: Sequence[Tensor]) -> Tensor:
    """Return all elements in one tensor, in float64 on the CPU, where steps are compared."""
    return torch.cat([part.detach().reshape(-1).double().cpu() for part in vector])


def _shrunk(value: object, parameter: Tensor, small: Tensor) -> object:
    """Return a value of a parameter's state for a smaller parameter."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape != parameter.shape:
        return value.detach().clone()
    return torch.full_like(small, float(value.detach().float().mean()), requires_grad=False)
