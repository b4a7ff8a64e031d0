"""What the options of a learned rate may be, and what to say when they are not."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

__all__ = ["check_meta_optimizer", "check_numbers"]


def check_meta_optimizer(meta_optimizer: Any) -> None:
    """Raise unless this can build a meta-optimizer."""
    if not (meta_optimizer is None or callable(meta_optimizer)):
        raise TypeError(
            f"meta_optimizer must be a function that builds an optimizer from a list of tensors, got "
            f"{type(meta_optimizer).__name__}: pass functools.partial(torch.optim.Adam, lr=0.1), for instance"
        )


def check_numbers(over_relaxation: Any, max_change: Any, bounds: Any) -> None:
    """Raise unless the numbers among the rule's options are numbers that make sense."""
    if over_relaxation != "auto" and not isinstance(over_relaxation, Real):
        raise TypeError(f"over_relaxation must be a number or 'auto', got {over_relaxation!r}: use 1 to turn it off")
    if over_relaxation != "auto" and not float(over_relaxation) > 0:
        raise ValueError(f"over_relaxation must be positive, got {over_relaxation}: use 1 to turn it off")
    if not isinstance(max_change, Real | None):
        raise TypeError(f"max_change must be a number, or None for no limit, got {max_change!r}")
    if max_change is not None and not float(max_change) > 0:
        raise ValueError(f"max_change must be positive or None, got {max_change}")
    if not (isinstance(bounds, tuple | list) and len(bounds) == 2 and all(isinstance(b, Real) for b in bounds)):
        raise TypeError(f"bounds must be a pair of numbers, got {bounds!r}: pass (1e-10, 1e4), for instance")
    if not 0 < bounds[0] < bounds[1] < math.inf:
        raise ValueError(f"bounds must be 0 < lowest < highest, got {bounds}")
