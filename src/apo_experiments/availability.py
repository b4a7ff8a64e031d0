"""Which methods need a package that is not installed."""

from __future__ import annotations

import importlib.util

__all__ = ["NEEDS", "missing_package"]

#: The module and the package of methods that torch alone does not have.
NEEDS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            *("shampoo", "soap", "psgd-kron", "prodigy", "d-adaptation", "adamg"),
            *("schedule-free-sgd", "schedule-free-adamw", "schedule-free-sgd-warm", "schedule-free-adamw-warm"),
        ),
        ("pytorch_optimizer", "pytorch-optimizer"),
    ),
    "dog": ("dog", "dog-optimizer"),
    "mechanic": ("mechanic_pytorch", "mechanic-pytorch"),
}


def missing_package(method: str) -> str | None:
    """Return the name of the package that a method needs and that is not installed, or None.

    Example:
        >>> missing_package("sgdm") is None
        True
    """
    module, package = NEEDS.get(method, (None, None))
    return package if module is not None and importlib.util.find_spec(module) is None else None
