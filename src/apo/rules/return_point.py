"""The weights at which the loss last fell, for a network that is lost in the first steps of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from apo.vectors import assign_, copies, norm

__all__ = ["ReturnPoint"]

#: After so many steps no copy of the weights is kept: it costs memory, and a network that has learned so long is rarely
#: lost.
_STEPS = 2000
#: A loss that has grown by this factor says that the weights have exploded, not that a gradient is faulty.
_FAR = 100.0


class ReturnPoint:
    """The weights at which the loss last fell: one copy of parameters and buffers, in the first steps of training.

    The optimizer's state goes back to what it was before the first step, that is, to nothing. An optimizer that had one
    before its first step, because it builds it early or was loaded, keeps no return point.

    Args:
        model: The network.
        optimizer: Its optimizer.

    Attributes:
        kept: The copies; empty if there is nothing to go back to.

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
        self.kept: list[Tensor] = []
        self._owned = 0  # how many of them are the optimizer's parameters
        self._loss = 0.0  # at the weights that are kept

    def keep(self, step: int, loss: float) -> None:
        """Take the weights in force as good ones, if it is early enough in training."""
        if not self._can_empty_state or step >= _STEPS:
            return
        self._loss = loss
        owned = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._owned, self._tensors = len(owned), [*owned, *self._model.buffers()]
        if len(self._tensors) == len(self.kept):
            assign_(self.kept, self._tensors)
        else:  # at first, and when a group was added
            self.kept = copies(self._tensors)

    def expire(self, step: int) -> None:
        """Drop the copy when its time is over: a network that is lost later must not go back as far as that."""
        if step >= _STEPS:
            self._tensors, self.kept = [], []

    def is_far_below(self, loss: float) -> bool:
        """Whether a loss is so high that the weights must have exploded since."""
        return bool(self.kept) and loss > _FAR * abs(self._loss)

    def is_far_from(self, parameters: Sequence[Tensor], agree: Callable[[Tensor], float]) -> bool:
        """Whether parameters are so large, or not finite, that they must have exploded since.

        Args:
            parameters: Those that move.
            agree: Returns one number for all processes.
        """
        if not self.kept:
            return False
        usual = max(agree(norm(self.kept[: self._owned])), 1.0)  # weights may be zero at first
        return not agree(norm(parameters)) <= _FAR * usual

    @contextmanager
    def in_force(self, theta: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """Have the kept parameters in the network meanwhile.

        Args:
            theta: Copies of parameters as they are now; those that are not in it are copied here.
        """
        owned = self._tensors[: self._owned]
        others = [p for p in owned if p not in theta]
        now = {**theta, **dict(zip(others, copies(others), strict=True))}
        assign_(owned, self.kept[: self._owned])
        try:
            yield
        finally:
            assign_(owned, [now[p] for p in owned])

    def go_back(self) -> bool:
        """Put the kept weights into the network and empty the optimizer's state; return False if there are none."""
        if not self.kept:
            return False
        assign_(self._tensors, self.kept)
        self._optimizer.state.clear()
        return True
