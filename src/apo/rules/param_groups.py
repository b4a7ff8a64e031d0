r"""Compose learned rates with learning-rate schedulers: the scheduler's factor multiplies the learned rate.

``param_groups[i]["lr"]`` must show the rate in force, and it is also where torch's schedulers read and write. They come
in two kinds, and both have to work without knowing about apo:

* *recursive* ones (StepLR, ExponentialLR, CosineAnnealingLR, ``group["lr"] *= 0.1``) read the rate and write a
  multiple of it: the factor changes by the ratio of what is written to what was there;
* *closed-form* ones (LambdaLR and all of Hugging Face's, CosineAnnealingWarmRestarts, OneCycleLR) write
  ``initial_lr * f(t)`` whatever the rate is: the factor is the ratio of what is written to ``initial_lr`` (OneCycleLR's
  ``max_lr``, because its ``initial_lr`` is a small part of the rate that the user means).

A number does not tell where it comes from, so the rate is a :class:`Rate`: a float whose products and sums are
:class:`Rate` again. A written :class:`Rate` was made from the rate in force, a plain float was not. (ReduceLROnPlateau
turns the rate into a plain float first, but works without the step counter that the closed-form schedulers install;
next to another scheduler it looks like a closed-form one, so use it alone.)
A rate that is a tensor cannot remember: every write to it counts as that of a recursive scheduler.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.torch_internals import is_wrapped_by_scheduler, version_of

__all__ = ["Rate", "ScheduledGroup", "base_rate", "is_scheduled", "note_scheduler"]

#: What a scheduler may keep in a param group to compute rates from (the last two are OneCycleLR's).
_BASES = ("initial_lr", "max_lr", "min_lr")

#: Optimizers whose schedulers were built on a wrapper around them (Accelerate's, say), which then has torch's mark.
_SCHEDULED_THROUGH_A_WRAPPER: weakref.WeakSet[Any] = weakref.WeakSet()


class Rate(float):
    """A learning rate that remembers, through arithmetic, that it was made from the rate in force.

    Its products and sums with tensors and arrays are tensors and arrays, as a float's.

    Example:
        >>> type(0.5 * Rate(0.1)).__name__, type(0.5 * 0.1).__name__
        ('Rate', 'float')
    """

    # Between the priorities of NumPy's scalars, which so leave their arithmetic with a Rate to Rate, and of its arrays.
    __array_priority__ = -1.0

    def __mul__(self, other: Any) -> Any:
        return _remembering(float(self) * other)

    def __add__(self, other: Any) -> Any:
        return _remembering(float(self) + other)

    def __sub__(self, other: Any) -> Any:
        return _remembering(float(self) - other)

    def __rsub__(self, other: Any) -> Any:
        return _remembering(other - float(self))

    def __truediv__(self, other: Any) -> Any:
        return _remembering(float(self) / other)

    def __rtruediv__(self, other: Any) -> Any:
        return other / float(self)

    def __rpow__(self, other: Any, modulus: None = None) -> Any:
        return other ** float(self)

    __rmul__ = __mul__
    __radd__ = __add__


def _as_float(compare: Callable[[Any, Any], Any]) -> Callable[[Rate, Any], Any]:
    return lambda self, other: compare(float(self), other)


# NumPy's scalars leave comparisons to Rate as well, and a float does not know those that are no float64.
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Rate, _name, _as_float(getattr(operator, _name)))


def _remembering(result: Any) -> Any:
    """Make a number a Rate; leave tensors and arrays as they are."""
    return Rate(result) if isinstance(result, Real) else result


# A scheduler's state_dict holds the rates it saw last; torch.load(weights_only=True) has to accept them.
torch.serialization.add_safe_globals([Rate])


def base_rate(group: Mapping[str, Any], optimizer: Optimizer) -> float:
    """Return the rate of a param group without the factor of a scheduler that is at work already."""
    if isinstance(group, ScheduledGroup):
        group = group.plain()
    return _reference(group) if is_scheduled(optimizer) and "initial_lr" in group else float(group["lr"])


def _reference(group: Mapping[str, Any]) -> float:
    """Return the rate at which a schedule's factor is one."""
    return float(group.get("max_lr", group["initial_lr"]))


def is_scheduled(optimizer: Optimizer) -> bool:
    """Return whether a scheduler that may be of the closed form serves this optimizer."""
    return is_wrapped_by_scheduler(optimizer) or optimizer in _SCHEDULED_THROUGH_A_WRAPPER


def note_scheduler(optimizer: Optimizer) -> None:
    """Remember that a scheduler serves this optimizer, though torch's mark is on a wrapper around it."""
    _SCHEDULED_THROUGH_A_WRAPPER.add(optimizer)


class ScheduledGroup(dict):
    """A param group whose ``"lr"`` is a learned rate times a schedule's factor.

    Writing ``group["lr"]`` changes the factor; reading it gives the rate in force.

    Args:
        group: The optimizer's own param group.
        optimizer: The optimizer, to see whether a scheduler is at work.
        learned: The learned rate to begin with.
        factor: The schedule's factor to begin with; None for the one that the group's rate contains.
    """

    def __init__(
        self, group: dict[str, Any], optimizer: Optimizer, learned: float, factor: float | None = None
    ) -> None:
        if isinstance(group, ScheduledGroup):  # of a rule that is given up, or of a copied optimizer
            group = group.plain()
        super().__init__(group)
        # Schedulers take this as their base; without it they would take the Rate, and look recursive.
        self._lends_initial_lr = "initial_lr" not in group
        super().setdefault("initial_lr", float(group["lr"]))
        self._optimizer = optimizer
        self.factor = float(group["lr"]) / base_rate(group, optimizer) if factor is None else factor
        self.learned = learned
        self._seen_version = 0
        self.show(learned)

    def show(self, learned: float) -> None:
        """Set the learned rate, and show the rate in force."""
        self.learned = learned
        self._write(learned * self.factor)

    def use(self, rate: float) -> None:
        """Let the optimizer step at exactly this rate once; :meth:`show` ends it."""
        self._write(rate)

    def settle(self) -> None:
        """Take in a rate that was written past ``__setitem__`` (by ``dict.update``, or into a tensor)."""
        current = self["lr"]
        if isinstance(current, Tensor):  # reading its value would wait for the device
            changed = version_of(current) != self._seen_version
        else:
            changed = current != self.learned * self.factor
        if changed:
            self._rescale(current)

    def compare(self, group: Mapping[str, Any]) -> tuple[float, float | None]:
        """Return the ratio of a new group's rate to this one's, and the factor in it; None for the one it shows."""
        if is_scheduled(self._optimizer) and "initial_lr" in group:  # a scheduler that knows the new group
            return base_rate(group, self._optimizer) / self.learned, None
        return float(group["lr"]) / (self.learned * self.factor or self.learned), self.factor

    def __setitem__(self, key: str, value: Any) -> None:
        """Turn a rate that is written into the schedule's factor."""
        if key == "lr":
            self._rescale(value)
        else:
            self._lends_initial_lr &= key != "initial_lr"
            # A base that was read off the rate in force (OneCycleLR's max_lr) is a base from now on.
            super().__setitem__(key, float(value) if isinstance(value, Rate) else value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Notice a scheduler that is being built: each one asks for its base in this way, even through a wrapper."""
        if key == "initial_lr":
            note_scheduler(self._optimizer)
        return super().setdefault(key, default)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScheduledGroup:
        """Copy without going through ``__setitem__``."""
        twin = ScheduledGroup.__new__(ScheduledGroup)
        memo[id(self)] = twin
        dict.update(twin, copy.deepcopy(dict(self), memo))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        twin._write(twin["lr"])  # a copied tensor counts its versions from zero
        return twin

    def __reduce__(self) -> tuple:
        """Pickle as a plain param group."""
        return dict, (self.plain(),)

    def plain(self) -> dict[str, Any]:
        """Return an ordinary param group with the rate in force, to which the schedule's bases refer from now on."""
        lr = self["lr"]
        group = {**self, "lr": lr if isinstance(lr, Tensor) else float(lr)}
        if is_scheduled(self._optimizer):
            scale = self.learned / _reference(self)
            group |= {base: group[base] * scale for base in _BASES if base in group}
        elif self._lends_initial_lr:
            del group["initial_lr"]
        return group

    def _rescale(self, written: float | Tensor) -> None:
        scheduled, in_force = is_scheduled(self._optimizer), self.learned * self.factor
        closed_form = scheduled and not isinstance(written, (Rate, Tensor))
        if closed_form or (scheduled and not in_force):  # from zero a scheduler can only come up by a part of its base
            self.factor = float(written) / _reference(self)
        else:
            self.factor = float(written) / self.learned
        self._write(self.learned * self.factor)

    def _write(self, rate: float | Tensor) -> None:
        current = self["lr"]
        if isinstance(current, Tensor):
            current.fill_(float(rate))
            self._seen_version = version_of(current)
        else:
            super().__setitem__("lr", Rate(rate))
