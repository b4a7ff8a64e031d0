r"""Compose learned rates with learning-rate schedulers: the scheduler's factor multiplies the learned rate.

``param_groups[i]["lr"]`` must show the rate in force, and it is also where schedulers read and write. They come in
four kinds, and all have to work without knowing about apo:

* *recursive* ones (StepLR, ExponentialLR, CosineAnnealingLR, ReduceLROnPlateau, ``group["lr"] *= 0.1``) read the rate
  and write a multiple of it: the factor changes by the ratio of what is written to what was there;
* *closed-form* ones (LambdaLR and all of Hugging Face's, CosineAnnealingWarmRestarts, OneCycleLR, CyclicLR) write
  ``initial_lr * f(t)`` whatever the rate is: the factor is the ratio of what is written to ``initial_lr`` (the
  ``max_lr`` of OneCycleLR and CyclicLR, whose ``initial_lr`` is a small part of the rate that the user means);
* a *training loop* that writes ``group["lr"] = schedule(step)`` is of the closed form too, see
  :class:`HandWritten`;
* SWALR goes to a rate of its own, which is then the rate in force.

A number does not tell where it comes from, so a scheduler's ``get_lr`` reads the rate as a :class:`Rate`: a float whose
products and sums are :class:`Rate` again. A :class:`Rate` that it writes was made from the rate in force, a plain float
was not. Everyone else reads a plain float, because what is read may be saved.
A rate that is a tensor cannot remember: every write to it counts as that of a recursive scheduler.
"""

from __future__ import annotations

import copy
import math
import operator
import sys
import warnings
import weakref
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from apo.errors import ApoWarning
from apo.rules.rate_writers import Place, meaning_of_schedule, place_of_access, read_by_get_lr, writing_scheduler
from apo.torch_internals import is_wrapped_by_scheduler, version_of

__all__ = ["Rate", "ScheduledGroup", "base_rate", "is_scheduled", "note_scheduler"]

#: What a scheduler may keep in a param group to compute rates from: the last two are OneCycleLR's, and we note the
#: ``max_lr`` of CyclicLR there.
_BASES = ("initial_lr", "max_lr", "min_lr")

#: Optimizers whose schedulers were built on a wrapper around them (Accelerate's, say), which then has torch's mark.
_SCHEDULED_THROUGH_A_WRAPPER: weakref.WeakSet[Any] = weakref.WeakSet()

#: A rate that is written in this many iterations in a row is a schedule.
_IN_A_ROW = 3

#: Nearly all reads come from an optimizer or from apo itself. Schedulers live beside torch's optimizers.
_READERS, _SCHEDULERS = ("torch.optim.", "apo."), ("torch.optim.lr_scheduler", "torch.optim.swa_utils")

#: What users were told about the rates of an optimizer: once, not for every group.
_SAID: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


class Rate(float):
    """A learning rate that remembers, through arithmetic, that it was made from the rate in force.

    Only a scheduler's ``get_lr`` gets to see one, and no file holds one. Its products and sums with tensors and arrays
    are tensors and arrays, as a float's.

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


# NumPy's scalars leave comparisons to Rate as well, and a float does not know those that are no float64.
for _compare in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
    setattr(Rate, f"__{_compare.__name__}__", lambda self, other, compare=_compare: compare(float(self), other))


def _remembering(result: Any) -> Any:
    """Make a number a Rate; leave tensors and arrays as they are."""
    return Rate(result) if isinstance(result, Real) else result


# The schedulers' files of earlier releases hold rates of this class; torch.load(weights_only=True) has to accept them.
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


class HandWritten:
    """Decides what the rates mean that a training loop itself writes into one param group.

    A rate that is written now and then is the rate in force. One that is written in every iteration, or in every epoch
    from the first one on, is a schedule: multiples of the initial rate. Neither holds for one that was made from the
    rate in force (``group["lr"] *= 0.5``).

    Args:
        initial: The rate that the group had at first.
        is_schedule: Whether it is known to be a schedule already; an attribute, too.

    Attributes:
        last: The rate that the loop wrote last, unless it was made from the rate in force.

    Example:
        >>> hand = HandWritten(0.1)
        >>> for rate in (0.09, 0.08):
        ...     _ = hand.is_made_from(0.5, rate, was_read=False)
        ...     hand.note_step()
        >>> hand.is_schedule
        True
    """

    def __init__(self, initial: float, is_schedule: bool = False) -> None:
        self.is_schedule = is_schedule
        self.last = initial
        self._steps = 0
        self._written = False  # since the last step
        self._in_a_row = 0  # the iterations before this one in which a rate was written
        self._from_the_start = False  # whether one was written before the first step

    def note_step(self) -> None:
        """Take notice of a step of the optimizer."""
        self._in_a_row = self._in_a_row + 1 if self._written else 0
        self._from_the_start |= self._written and not self._steps
        self._written = False
        self._steps += 1

    def is_made_from(self, in_force: float, written: float, was_read: bool) -> bool:
        """Take notice of a rate that is written, and return whether it was made from the rate in force.

        Args:
            in_force: The rate in force.
            written: The rate that is written in its place.
            was_read: Whether the training loop has read the rate in force since the last step, perhaps only for a log.
        """
        if was_read:
            nearness = self._nearness(in_force, written)
            if nearness > 0 or (nearness == 0 and not self.is_schedule):
                self.last = written if self.is_schedule else self.last
                return True
        self.last = written
        self._written = True
        if self._steps and (self._from_the_start or self._in_a_row >= _IN_A_ROW - 1):
            self.is_schedule = True
        return False

    def _nearness(self, in_force: float, written: float) -> int:
        """Return 1 for a rate that is much nearer to the one in force than to the last one written, -1 for the reverse.

        Once the learned rate has moved away from the initial one, both are far apart, and a schedule continues from
        what it wrote last. Before that it hardly matters from which of both a rate is made.
        """
        if in_force == self.last or not min(in_force, written, self.last) > 0:
            return -1
        to_rate_in_force, to_last = abs(math.log(written / in_force)), abs(math.log(written / self.last))
        if 2 * to_rate_in_force < to_last:
            return 1
        return -1 if 2 * to_last < to_rate_in_force else 0


class ScheduledGroup(dict):
    """A param group whose ``"lr"`` is a learned rate times a schedule's factor.

    Writing ``group["lr"]`` changes the factor; reading it gives the rate in force.

    Args:
        group: The optimizer's own param group.
        optimizer: The optimizer, to see whether a scheduler is at work.
        learned: The learned rate to begin with.
        factor: The schedule's factor to begin with; None for the one that the group's rate contains.
        by_hand: Whether the training loop is known to write a schedule itself.
    """

    def __init__(
        self,
        group: dict[str, Any],
        optimizer: Optimizer,
        learned: float,
        factor: float | None = None,
        by_hand: bool = False,
    ) -> None:
        if isinstance(group, ScheduledGroup):  # of a rule that is given up, or of a copied optimizer
            group = group.plain()
        super().__init__(group)
        # Schedulers take this as their base; without it they would take the rate in force when they are built.
        self._lends_initial_lr = "initial_lr" not in group
        super().setdefault("initial_lr", float(group["lr"]))
        self._optimizer = optimizer
        self.factor = float(group["lr"]) / base_rate(group, optimizer) if factor is None else factor
        self.learned = learned
        self._seen_version = 0
        self._hand = HandWritten(float(group["lr"]) if factor is None else _reference(self) * self.factor, by_hand)
        self._read_at: Place | None = None  # where the training loop has read the rate since it was last written
        self.show(learned)

    @property
    def by_hand(self) -> bool:
        """Whether the training loop writes a schedule itself."""
        return self._hand.is_schedule

    def show(self, learned: float) -> None:
        """Set the learned rate, and show the rate in force."""
        self.learned = learned
        self._write(learned * self.factor)

    def use(self, rate: float) -> None:
        """Let the optimizer step at exactly this rate once; :meth:`show` ends it."""
        self._write(rate)

    def settle(self) -> None:
        """Take in a rate that was written past ``__setitem__`` (by ``dict.update``, or into a tensor)."""
        current = super().__getitem__("lr")
        if isinstance(current, Tensor):  # reading its value would wait for the device
            changed = version_of(current) != self._seen_version
        else:
            changed = current != self.learned * self.factor
        if changed:
            self._rescale(current)
        self._hand.note_step()
        self._read_at = None

    def compare(self, group: Mapping[str, Any]) -> tuple[float, float | None]:
        """Return the ratio of a new group's rate to this one's, and the factor in it; None for the one it shows."""
        if is_scheduled(self._optimizer) and "initial_lr" in group:  # a scheduler that knows the new group
            return base_rate(group, self._optimizer) / self.learned, None
        return float(group["lr"]) / (self.learned * self.factor or self.learned), self.factor

    def __getitem__(self, key: str) -> Any:
        """Give the rate in force to a scheduler in a form that remembers it, and as a plain number to all others."""
        value = dict.__getitem__(self, key)  # super() would double the time, and every step reads every key
        if key != "lr" or isinstance(value, Tensor):
            return value
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if reader.startswith(_READERS) and reader not in _SCHEDULERS:
            return value
        if read_by_get_lr():
            return Rate(value)
        self._read_at = place_of_access() or self._read_at
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        """Turn a rate that is written into the schedule's factor."""
        if key == "lr":
            self._rescale(value, writing_scheduler(), place_of_access())
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
        twin._write(dict.__getitem__(twin, "lr"))  # a copied tensor counts its versions from zero
        return twin

    def __reduce__(self) -> tuple:
        """Pickle as a plain param group."""
        return dict, (self.plain(),)

    def plain(self) -> dict[str, Any]:
        """Return an ordinary param group with the rate in force, to which the schedule's bases refer from now on."""
        group = dict(self)
        if is_scheduled(self._optimizer):
            scale = self.learned / _reference(self)
            group |= {base: group[base] * scale for base in _BASES if base in group}
        elif self._lends_initial_lr:
            del group["initial_lr"]
        return group

    def _rescale(
        self, written: float | Tensor, scheduler: LRScheduler | None = None, place: Place | None = None
    ) -> None:
        """Change the factor so that the rate in force becomes what was meant by the rate that was written."""
        if isinstance(written, Tensor):
            is_multiple = is_scheduled(self._optimizer) and not self.learned * self.factor
        elif scheduler is None or not type(scheduler).step.__module__.startswith("torch."):
            # A scheduler with a step of its own may read the rate outside get_lr.
            is_multiple = self._is_multiple_by_hand(float(written), place)
        else:
            is_multiple = self._is_multiple_of(scheduler, written)
        self._read_at = None
        self.factor = float(written) / (_reference(self) if is_multiple else self.learned)
        self._write(self.learned * self.factor)

    def _is_multiple_of(self, scheduler: LRScheduler, written: float) -> bool:
        """Return whether a scheduler of torch has written a multiple of its base, not of the rate in force."""
        in_force = self.learned * self.factor
        if isinstance(scheduler, ReduceLROnPlateau):
            return False  # it multiplies the rate in force, after turning it into a plain float
        if isinstance(scheduler, SWALR):
            if abs(written - in_force) > 1e-6 * in_force:
                self._say(
                    "SWALR",
                    f"SWALR sets a rate of its own: from now on the rate in force is its swa_lr={self['swa_lr']:g}, "
                    "not a multiple of the learned one; leave SWALR out to average weights at the learned rate",
                )
            return False
        if isinstance(scheduler, CyclicLR):
            self._note_cycle(scheduler, written)
        # From zero a scheduler can only come up by a part of its base.
        return not isinstance(written, Rate) or not in_force

    def _note_cycle(self, scheduler: CyclicLR, written: float) -> None:
        """Note the top of CyclicLR's cycle, which stands for the learned rate; it does not write that itself."""
        tops = getattr(scheduler, "max_lrs", None)
        if tops is None:  # it is being built, and writes its base
            if self._lends_initial_lr:
                super().__setitem__("initial_lr", float(written))
        else:
            index = next(i for i, group in enumerate(self._optimizer.param_groups) if group is self)
            super().__setitem__("max_lr", float(tops[index]))

    def _is_multiple_by_hand(self, written: float, place: Place | None) -> bool:
        """Return whether the training loop has written a multiple of the initial rate."""
        if place is not None and place == self._read_at:  # group["lr"] *= 0.5
            return False
        if is_scheduled(self._optimizer):
            self._hand.is_schedule = True
        known, last = self.by_hand, self._hand.last
        if self._hand.is_made_from(self.learned * self.factor, written, self._read_at is not None):
            return False
        if self.by_hand and not known:
            self._say("by hand", meaning_of_schedule(_reference(self), last, written))
        return self.by_hand

    def _say(self, what: str, message: str) -> None:
        said = _SAID.setdefault(self._optimizer, set())
        if what not in said:
            said.add(what)
            warnings.warn(message, ApoWarning, stacklevel=5)

    def _write(self, rate: float | Tensor) -> None:
        current = super().__getitem__("lr")
        if isinstance(current, Tensor):
            current.fill_(float(rate))
            self._seen_version = version_of(current)
        else:
            super().__setitem__("lr", float(rate))
