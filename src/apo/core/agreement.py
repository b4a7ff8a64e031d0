"""Check that the loss which apo runs again is the one that training minimises.

A look-ahead evaluates the losses that the network and the criterion made. A second loss that the loop computes without
them, noise that it adds to the gradients or a state outside of the modules is part of training, and the look-ahead does
not see it. A little of that does no harm. If most of the gradient comes from elsewhere, the learned rate is the best
one for another problem. So the gradient of what apo sees is compared with the one that the optimizer has used, at the
first meta-step and rarely after it, because the weights of several losses may change during training. Some optimizers
(LARS) write what they make of the gradients into them; then there is nothing to compare with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from apo.torch_internals import version_of
from apo.vectors import dot, norm

__all__ = ["Agreement", "cosine"]

#: Below this cosine less than a quarter of the gradient's square is along that of the loss which apo sees.
_LEAST = 0.5
#: When to look for the second time, and by which factor the number of steps grows until the next time.
_AGAIN, _FACTOR = 100, 10

_SENTENCE = (
    "the gradients that the optimizer used are not those of the loss that apo runs again (their cosine is below "
    f"{_LEAST}), so the learned rate may be wrong: put all parts of the loss into the criterion, criterion = "
    "apo.criterion(your_function), and do not add noise to the gradients; if neither is possible, train without apo"
)


class Agreement:
    """Decides when to compare gradients, and what to say about the result.

    Example:
        >>> agreement = Agreement()
        >>> [step for step in range(0, 5000, 10) if agreement.is_due(step)]
        [0, 100, 1000]
        >>> agreement.sentences(0.99), len(agreement.sentences(0.1))
        ([], 1)
    """

    def __init__(self) -> None:
        self._next = 0
        self._before: list[tuple[int, int]] | None = None  # the versions of the gradients before the optimizer's step

    def note_gradients(self, step: int, parameters: Iterable[Tensor]) -> None:
        """Take notice of the gradients with which the optimizer is about to step."""
        if step >= self._next:
            self._before = _versions(parameters)

    def is_due(self, step: int, parameters: Iterable[Tensor] = ()) -> bool:
        """Return whether to compare at this meta-step; it is then not due again for long.

        Args:
            step: Index of the training step.
            parameters: Those of :meth:`note_gradients`. If the step has changed their gradients, none are compared.
        """
        if step < self._next:
            return False
        self._next = max(_AGAIN, _FACTOR * step)
        before, self._before = self._before, None
        return before is None or before == _versions(parameters)

    def sentences(self, found: float | None) -> list[str]:
        """Return what the user should know.

        Args:
            found: The cosine; None if it was not due. It is NaN if a gradient is zero, which others tell the user.
        """
        return [_SENTENCE] if found is not None and found < _LEAST else []


def _versions(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return which tensors the gradients are, and their version counters; that waits for no device."""
    return [(id(p.grad), version_of(p.grad)) for p in parameters if p.grad is not None]


def cosine(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Return the cosine of the angle between two vectors; NaN if one of them is zero.

    Example:
        >>> import torch
        >>> cosine([torch.tensor([1.0, 0.0])], [torch.tensor([3.0, 4.0])]).item() == torch.tensor(0.6).item()
        True
    """
    return dot(left, right) / (norm(left) * norm(right))
