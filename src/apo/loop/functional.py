"""A functional loss as a module: hooks can watch a module, not a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["FunctionalLoss", "criterion"]


class FunctionalLoss(nn.Module):
    """A functional loss as a module, so that it can be watched."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the function."""
        return self.function(*args, **kwargs)


def criterion(function: Callable[..., Tensor]) -> nn.Module:
    """Wrap a functional loss so that :func:`attach` can watch it; use the result in its place in the loop.

    Example:
        >>> import apo, torch, torch.nn.functional as F
        >>> loss_function = apo.criterion(F.cross_entropy)
        >>> loss_function(torch.zeros(2, 4), torch.tensor([0, 1])).item() > 1
        True
    """
    if isinstance(function, type):
        raise TypeError(f"function must be a loss, got the class {function.__name__}: pass an instance of it")
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    return FunctionalLoss(function)
