"""Where a network that is lost goes back to: the weights at which the loss last fell.

A step that is too long may kill a network: all ReLUs off, outputs at chance, or NaN. Lowering the rate does not bring
it back, so in the first steps, when that happens, the last good weights are kept beside those in force: one copy of the
parameters and buffers, for :data:`_STEPS` steps.

The optimizer's state goes back to what it was before the first step, that is, to nothing. An optimizer that had one
before its first step, because it builds it early or was loaded, keeps no return point.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from apo.vectors import assign_, copies

__all__ = ["ReturnPoint"]

#: After so many steps no copy is kept: it costs memory, and a network that has learned so long is rarely lost.
_STEPS = 2000
#: A loss that has grown by this factor says that the weights have exploded, not that a gradient is faulty.
_FAR = 100.0


class ReturnPoint:
    """A copy of parameters and buffers.

    Args:
        model: The network.
        optimizer: Its optimizer.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> point = ReturnPoint(model, optimizer)
        >>> point.keep(0, loss=2.3)
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(float("nan"))
        >>> point.go_back(), bool(model.weight.isfinite().all())
        (True, True)
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._can_empty_state = not optimizer.state
        self._tensors: list[Tensor] = []  # those of the network and the optimizer that were there
        self._kept: list[Tensor] = []  # their copies
        self._loss = 0.0  # at the weights that are kept

    def keep(self, step: int, loss: float) -> None:
        """Take the weights in force as good ones, if it is early enough in training."""
        if not self._can_empty_state or step >= _STEPS:
            return
        self._loss = loss
        owned = [p for group in self._optimizer.param_groups for p in group["params"]]
        tensors = [*owned, *self._model.buffers()]
        if len(tensors) == len(self._kept):
            self._tensors = tensors
            assign_(self._kept, tensors)
        else:  # at first, and when a group was added
            self._tensors, self._kept = tensors, copies(tensors)

    def expire(self, step: int) -> None:
        """Drop the copy when its time is over: a network that is lost later must not go back as far as that."""
        if step >= _STEPS:
            self._tensors, self._kept = [], []

    def is_far_below(self, loss: float) -> bool:
        """Whether a loss is so high that the weights must have exploded since."""
        return self.is_kept and loss > _FAR * abs(self._loss)

    @property
    def is_kept(self) -> bool:
        """Whether there is anything to go back to."""
        return bool(self._kept)

    def go_back(self) -> bool:
        """Put the kept weights into the network and empty the optimizer's state; return False if there are none."""
        if not self._kept:
            return False
        assign_(self._tensors, self._kept)
        self._optimizer.state.clear()
        return True
