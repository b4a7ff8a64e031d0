"""What happens to a step whose gradients are not finite, if it is not to end the run: ``on_nonfinite="skip"``.

An optimizer cannot be stopped from within its step, but it leaves parameters without a gradient alone, and its state
with them. So the gradients are taken away before it looks at them, as a GradScaler would leave the step out.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from apo.errors import ApoWarning, NonFiniteError
from apo.vectors import norm

__all__ = ["SkippedSteps"]


class SkippedSteps:
    """Decides which steps are left out, and warns of the first.

    Args:
        on_nonfinite: ``"raise"`` or ``"skip"``.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([1.0, float("nan")])
        >>> SkippedSteps("skip").takes_gradients([weight]), weight.grad
        (True, None)
    """

    def __init__(self, on_nonfinite: str) -> None:
        if on_nonfinite not in ("raise", "skip"):
            raise ValueError(f"on_nonfinite must be 'raise' or 'skip', got {on_nonfinite!r}: 'skip' leaves steps out")
        self.enabled = on_nonfinite == "skip"
        self._warned = False

    def takes_gradients(self, parameters: Iterable[Tensor]) -> bool:
        """Take all gradients away if one of them is not finite, and return whether; this waits for the device."""
        if not self.enabled:
            return False
        moving = [p for p in parameters if p.grad is not None]
        if bool(torch.isfinite(norm([p.grad for p in moving]))):  # type: ignore[misc]
            return False
        for parameter in moving:
            parameter.grad = None
        return True

    def covers(self, error: BaseException) -> bool:
        """Return whether a step that ended in this error is left out instead."""
        return self.enabled and isinstance(error, NonFiniteError)

    def warn(self, step: int) -> None:
        """Warn of the first step that is left out."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"step {step} was left out because its gradients, its loss or the weights after it are not finite "
                "(skipped_steps counts such steps): look for NaN in the data, or clip the gradients",
                ApoWarning,
                stacklevel=3,
            )
