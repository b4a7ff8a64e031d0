"""Hooks on other people's objects, and what the way torch runs them around an optimizer's step asks of ours.

* Hooks come off again, and neither copies of the objects nor files of them inherit them.
* A *closure* runs inside the step, after the hooks before it: code in it that reads the learning rate, or fails, has to
  find the optimizer as it is outside a step.
* A *subclass* whose ``step`` calls ``super().step()`` may run all hooks twice, the inner time for the same step.
* *Hooks of others* have to see what a step did in the end, not what was measured on the way: ours come last before the
  step and first after it.
* A *fused* optimizer leaves it to its step to unscale the gradients of a GradScaler.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from apo.torch_internals import optimizer_hook_runner, step_post_hooks, step_pre_hooks
from apo.vectors import norm

__all__ = [
    "REPLAYING", "Hooks", "hooks_of_others_around", "is_inner_step", "own_hooks", "refuse_compiled_step",
    "run_first", "run_last", "takes_gradients_away", "unscale_fused", "with_closure",
]  # fmt: skip


class _Replaying(threading.local):
    """Whether a tuner runs a network now: for any tuner that watches it, such passes are no training."""

    now = False


REPLAYING = _Replaying()


class _Hook:
    """A hook whose copies do nothing.

    ``copy.deepcopy(model)``, for an average of the weights say, copies the module's hooks unless they are
    left out. A copied bound method would carry a copy of the tuner and of the optimizer with it, and would
    record forward passes of the wrong network.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        owner: weakref.ref[Any] | None = None,
        when_compiled: Callable[..., Any] | None = None,
    ) -> None:
        self._function = function  # of the owner and the arguments, if there is an owner
        self._owner = owner
        self.when_compiled = when_compiled
        # A compiler that traces into a hook would make its effects part of a graph.
        self._untraced: Callable[..., Any] = torch.compiler.disable(_call_untraced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Without a compiler the detour would cost as much as everything else that a hook does on an ordinary step.
        if torch.compiler.is_dynamo_compiling():
            return self._untraced(self, args, kwargs)
        if self._owner is None:
            return self._function(*args, **kwargs)
        owner = None if REPLAYING.now else self._owner()
        return None if owner is None else self._function(owner, *args, **kwargs)

    @property
    def __name__(self) -> str:
        # torch.jit.script asks for it, to compile the hooks of a module along with it.
        raise AttributeError(
            "a network must not be scripted while apo is attached, got torch.jit.script: script a copy, "
            "torch.jit.script(copy.deepcopy(model)), or detach() apo first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(_do_nothing)

    def __reduce__(self) -> tuple:
        # For a module that decides itself how it is pickled: a function that does nothing, and is not one of apo's.
        return getattr, (nullcontext(), "__exit__")


def _call_untraced(hook: _Hook, args: tuple, kwargs: dict[str, Any]) -> Any:
    return (hook.when_compiled or hook)(*args, **kwargs)


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


class Hooks:
    """The hooks of one tuner.

    Example:
        >>> import torch
        >>> hooks, layer = Hooks(), torch.nn.Linear(1, 1)
        >>> handle = hooks.add(layer.register_forward_pre_hook, lambda module, args: print("called"))
        >>> _ = layer(torch.zeros(1, 1))
        called
        >>> hooks.remove()
        >>> _ = layer(torch.zeros(1, 1))
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        weakref.finalize(self, _remove, self._handles, self._modules).atexit = False

    def add(
        self,
        register: Callable[..., RemovableHandle],
        function: Callable[..., Any],
        weak: bool = False,
        when_compiled: Callable[..., Any] | None = None,
        **options: Any,
    ) -> RemovableHandle:
        """Register a hook through a ``register_*_hook`` method.

        Args:
            register: The method.
            function: What to call.
            weak: For a network that others may run as well: do not let the hook keep its method's object alive, it
                comes off when the object is gone, and do nothing while a tuner runs the network.
            when_compiled: What to call instead in code that ``torch.compile`` has traced.
            **options: Passed to ``register``.
        """
        owner = weakref.ref(function.__self__) if weak else None  # type: ignore[attr-defined]
        called = function.__func__ if weak else function  # type: ignore[attr-defined]
        handle = register(_Hook(called, owner, when_compiled), **options)
        self._handles.append(handle)
        watched = getattr(register, "__self__", None)
        if isinstance(watched, nn.Module):
            self._modules.add(watched)
            _StateWithoutHooks.put_into(watched)
        return handle

    def remove(self) -> None:
        """Remove all hooks."""
        _remove(self._handles, self._modules)


def refuse_compiled_step(*_: Any) -> None:
    """Raise: a compiled step does not see that param groups are exchanged and rates written around it."""
    raise RuntimeError(
        "optimizer.step must not be compiled while apo is attached, got a step inside torch.compile: compile the "
        "network and the loss, and call optimizer.step() outside, or detach() apo first"
    )


def _remove(handles: list[RemovableHandle], modules: weakref.WeakSet[nn.Module]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
    for module in modules:
        _StateWithoutHooks.take_from(module)
    modules.clear()


class _StateWithoutHooks:
    """A module's ``__getstate__``, for ``torch.save`` and ``copy.deepcopy``: what it would be without our hooks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # the module keeps this object

    def __call__(self) -> Any:
        module = self._module()
        assert module is not None
        get_state = getattr(type(module), "__getstate__", None)  # from Python 3.11 on every class has one
        state = vars(module).copy() if get_state is None else get_state(module)
        if not isinstance(state, dict):
            return state
        ours = own_hooks(state)
        state = {name: value for name, value in state.items() if not isinstance(value, _StateWithoutHooks)}
        for name, value in state.items():  # what torch notes about hooks lies under the same keys
            if "hooks" in name and isinstance(value, dict):
                state[name] = type(value)((key, hook) for key, hook in value.items() if key not in ours)
        return state

    @classmethod
    def put_into(cls, module: nn.Module) -> None:
        vars(module).setdefault("__getstate__", cls(module))

    @classmethod
    def take_from(cls, module: nn.Module) -> None:
        """Undo :meth:`put_into`, once the module has no hook of any tuner."""
        if isinstance(vars(module).get("__getstate__"), cls) and not own_hooks(vars(module)):
            del vars(module)["__getstate__"]


def own_hooks(state: dict[str, Any]) -> set[int]:
    """Return the keys of our hooks among the attributes of a module or an optimizer."""
    registries = (value for name, value in state.items() if "hooks" in name and isinstance(value, dict))
    return {key for hooks in registries for key, hook in hooks.items() if isinstance(hook, _Hook)}


def with_closure(
    args: tuple, kwargs: dict[str, Any], wrap: Callable[[Any], Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Return the arguments of a step, the optimizer first, with its closure wrapped; None if it has no closure.

    Example:
        >>> args, kwargs = with_closure(("optimizer", lambda: 2), {}, lambda closure: lambda: closure() + 1)
        >>> args[1]()
        3
    """
    if len(args) > 1 and callable(args[1]):
        return (args[0], wrap(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    return None


def is_inner_step(optimizer: Optimizer) -> bool:
    """Return, from within a hook, whether the step is part of another step of the same optimizer."""
    if not _extends_a_step(type(optimizer)):
        return False
    frame, steps = sys._getframe(1), 0
    while frame is not None:
        steps += frame.f_code is optimizer_hook_runner and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


@functools.lru_cache  # every step asks
def _extends_a_step(kind: type) -> bool:
    """Return whether a class overrides a ``step`` that it inherits."""
    steps = {inspect.unwrap(base.__dict__["step"]) for base in kind.__mro__ if "step" in base.__dict__}
    return len(steps - {Optimizer.step}) > 1


def run_last(hooks: dict[int, Any], handle: RemovableHandle) -> None:
    """Make a hook run after all others of its kind; not to be called while these run."""
    if next(reversed(hooks), None) != handle.id:
        hooks[handle.id] = hooks.pop(handle.id)


def run_first(hooks: dict[int, Any], handle: RemovableHandle) -> None:
    """Make a hook run before all others of its kind; not to be called while these run.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> one = optimizer.register_step_post_hook(lambda *_: print("one"))
        >>> two = optimizer.register_step_post_hook(lambda *_: print("two"))
        >>> run_first(step_post_hooks(optimizer), two)
        >>> optimizer.step()
        two
        one
    """
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)


def unscale_fused(optimizer: Optimizer) -> bool:
    """Unscale the gradients that a GradScaler leaves to a fused optimizer.

    Returns:
        Whether the scaler found an overflow, so that the optimizer will not step and neither may we.
    """
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return False
    found = getattr(optimizer, "found_inf", None)
    if found is not None and bool(found):
        return True
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    with torch.no_grad():
        for gradient in gradients:
            gradient.div_(scale.to(gradient.device))
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    return False


def takes_gradients_away(parameters: Iterable[Tensor]) -> bool:
    """Take all gradients away if one of them is not finite, and return whether: the coming step then moves nothing.

    An optimizer cannot be stopped from within its step, but it leaves parameters without a gradient alone, and its
    state with them. To look at the gradients waits for the device.
    """
    moving = [p for p in parameters if p.grad is not None]
    if bool(torch.isfinite(norm([p.grad for p in moving]))):  # type: ignore[misc]
        return False
    for parameter in moving:
        parameter.grad = None
    return True


def hooks_of_others_around(
    optimizer: Optimizer, own: RemovableHandle, has_stepped: Callable[[], bool]
) -> AbstractContextManager[None]:
    """Run the hooks of others around the whole block instead of around the ``optimizer.step()`` in it.

    Args:
        optimizer: The optimizer.
        own: The hook before the step that stays where it is.
        has_stepped: Returns whether the optimizer has stepped. A GradScaler leaves a step out after an overflow; the
            hooks after the step are left out with it.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> own = optimizer.register_step_pre_hook(lambda *_: print("own"))
        >>> _ = optimizer.register_step_pre_hook(lambda *_: print("before"))
        >>> with hooks_of_others_around(optimizer, own, lambda: True):
        ...     optimizer.step()
        before
        own
    """
    if len(step_pre_hooks(optimizer)) == 1 and not step_post_hooks(optimizer):  # as usual, there are no others
        return nullcontext()
    return _hooks_of_others_around(optimizer, own, has_stepped)


@contextmanager
def _hooks_of_others_around(
    optimizer: Optimizer, own: RemovableHandle, has_stepped: Callable[[], bool]
) -> Iterator[None]:
    before, after = step_pre_hooks(optimizer), step_post_hooks(optimizer)
    others_before, others_after = {key: hook for key, hook in before.items() if key != own.id}, dict(after)
    for hook in others_before.values():
        hook(optimizer, (), {})
    for key in others_before:
        del before[key]
    after.clear()
    try:
        yield
    finally:
        before.update(others_before)
        after.update(others_after)
    if has_stepped():
        for hook in others_after.values():
            hook(optimizer, (), {})
