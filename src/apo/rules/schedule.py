r"""Compose learned rates with learning-rate schedulers: the scheduler's factor multiplies the learned rate.

``param_groups[i]["lr"]`` must show the rate in force, and it is also where torch's schedulers read and write. They come
in two kinds, and both have to work without being told of us:

* *recursive* ones (StepLR, ExponentialLR, CosineAnnealingLR, ``group["lr"] *= 0.1``) read the rate and write a
  multiple of it: the factor changes by the ratio of what is written to what was there;
* *closed-form* ones (LambdaLR and all of Hugging Face's, CosineAnnealingWarmRestarts, OneCycleLR) write
  ``initial_lr * f(t)`` whatever the rate is: the factor is the ratio of what is written to ``initial_lr``.

A number does not tell where it comes from, so the rate is a :class:`Rate`: a float whose products and sums are
:class:`Rate` again. A written :class:`Rate` was made from the rate in force, a plain float was not. (ReduceLROnPlateau
turns the rate into a plain float first, but works without the step counter that the closed-form schedulers install.)
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Rate", "ScheduledGroup"]


class Rate(float):
    """A learning rate that remembers, through arithmetic, that it was made from the rate in force.

    Example:
        >>> type(0.5 * Rate(0.1)).__name__, type(0.5 * 0.1).__name__
        ('Rate', 'float')
    """

    def __mul__(self, other: float) -> Rate:
        return Rate(float(self) * other)

    def __add__(self, other: float) -> Rate:
        return Rate(float(self) + other)

    def __sub__(self, other: float) -> Rate:
        return Rate(float(self) - other)

    def __rsub__(self, other: float) -> Rate:
        return Rate(other - float(self))

    def __truediv__(self, other: float) -> Rate:
        return Rate(float(self) / other)

    __rmul__ = __mul__
    __radd__ = __add__


# A scheduler's state_dict holds the rates it saw last; torch.load(weights_only=True) has to accept them.
torch.serialization.add_safe_globals([Rate])


class ScheduledGroup(dict):
    """A param group whose ``"lr"`` is a learned rate times a schedule's factor.

    Whoever writes ``group["lr"]`` changes the factor, and reading it gives the rate in force at once.

    Args:
        group: The optimizer's own param group.
        optimizer: The optimizer, to see whether a scheduler is at work.
        learned: The learned rate to begin with.
        factor: The schedule's factor to begin with.
    """

    def __init__(self, group: dict[str, Any], optimizer: Optimizer, learned: float, factor: float = 1.0) -> None:
        super().__init__(group)
        # Schedulers take this as their base; without it they would take the Rate, and look recursive.
        self.setdefault("initial_lr", float(group["lr"]))
        self._optimizer = optimizer
        self.factor = factor
        self.learned = learned
        self.show(learned)

    def show(self, learned: float) -> None:
        """Set the learned rate, and show the rate in force."""
        self.learned = learned
        self._write(learned * self.factor)

    def use(self, rate: float) -> None:
        """Have the optimizer step at exactly this rate for once; :meth:`show` ends it."""
        self._write(rate)

    def settle(self) -> None:
        """Take in a rate that was written past ``__setitem__`` (by ``dict.update``, or into a tensor)."""
        current = self["lr"]
        if float(current) != self.learned * self.factor:
            self._rescale(current)

    def __setitem__(self, key: str, value: Any) -> None:
        """Turn a rate that somebody writes into the schedule's factor."""
        if key == "lr":
            self._rescale(value)
        else:
            super().__setitem__(key, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScheduledGroup:
        """Copy without going through ``__setitem__``."""
        twin = ScheduledGroup.__new__(ScheduledGroup)
        memo[id(self)] = twin
        dict.update(twin, copy.deepcopy(dict(self), memo))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce__(self) -> tuple:
        """Pickle as a plain param group."""
        return dict, (self.plain(),)

    def plain(self) -> dict[str, Any]:
        """Return an ordinary param group with the rate in force."""
        lr = self["lr"]
        return {**self, "lr": lr if isinstance(lr, Tensor) else float(lr)}

    def _rescale(self, written: float | Tensor) -> None:
        closed_form = hasattr(self._optimizer.step, "_wrapped_by_lr_sched") and type(written) in (float, int)
        in_force = self.learned * self.factor
        if closed_form and self["initial_lr"]:
            self.factor = float(written) / float(self["initial_lr"])
        elif in_force:
            self.factor *= float(written) / in_force
        else:  # a schedule that went down to zero and comes up again
            self.factor = float(written) / self.learned if self.learned else 0.0
        self._write(self.learned * self.factor)

    def _write(self, rate: float) -> None:
        current = self["lr"]
        if isinstance(current, Tensor):
            current.fill_(rate)
        else:
            super().__setitem__("lr", Rate(rate))
