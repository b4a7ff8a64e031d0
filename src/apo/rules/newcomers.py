"""Notice parameters that begin to move during training, because a learned rate may be too high for them.

A head that is trained on frozen layers bears a high rate, and the rate climbs there. When the layers are unfrozen, or
added to the optimizer, the first steps at that rate may destroy them, and with them what they had learned before. So
the first step that moves them is a meta-step, and the rule has a first look at it (:meth:`apo.Rule.first_look`).
"""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Newcomers"]


class Newcomers:
    """Notices parameters of an optimizer that begin to move after others: unfrozen, or added in a param group.

    Args:
        optimizer: The optimizer.

    Example:
        >>> import torch
        >>> layers = torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1)
        >>> newcomers = Newcomers(torch.optim.SGD([*layers[0].parameters(), *layers[1].parameters()], lr=0.1))
        >>> newcomers.are_waiting(), layers[0].requires_grad_() is layers[0], newcomers.are_waiting()
        (False, True, True)
        >>> newcomers.have_moved(), newcomers.are_waiting()
        (None, False)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._frozen: list[Tensor] = []  # those that have not moved so far
        self._groups = 0  # how many param groups are known

    def are_waiting(self) -> bool:
        """Return whether parameters will move for the first time; those that can when this is first asked are known."""
        if not self._groups:
            self.have_moved()
        if not self._frozen and self._groups == len(self._optimizer.param_groups):  # as usual; every step asks
            return False
        return any(p.requires_grad for p in self._unmoved())

    def have_moved(self) -> None:
        """Take note that all parameters that can move have done so."""
        self._frozen = [p for p in self._unmoved() if not p.requires_grad]
        self._groups = len(self._optimizer.param_groups)

    def _unmoved(self) -> list[Tensor]:
        return self._frozen + [p for group in self._optimizer.param_groups[self._groups :] for p in group["params"]]
