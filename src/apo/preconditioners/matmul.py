"""How precisely products with the factors are computed: the one choice that trades accuracy for time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["check_matmul", "operand_type", "tf32"]

_CHOICES = ("float32", "tf32", "bfloat16")


def check_matmul(matmul: str) -> None:
    """Refuse a precision that is none."""
    if matmul not in _CHOICES:
        raise ValueError(f"matmul is {matmul!r}: pass 'float32', 'tf32' or 'bfloat16'.")


def operand_type(matmul: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which factors of type ``dtype`` enter a product.

    Example:
        >>> operand_type("bfloat16", torch.float32), operand_type("tf32", torch.float32)
        (torch.bfloat16, torch.float32)
    """
    return torch.bfloat16 if matmul == "bfloat16" else dtype


@contextmanager
def tf32() -> Iterator[None]:
    """Allow tensor cores to round the operands of float32 products, and put torch's setting back afterwards.

    The setting belongs to the process; on devices without TF32 it changes nothing.
    """
    backend: Any = torch.backends.cuda.matmul
    # torch 2.9 replaced the old switch; reading it fails once the new one has been used, so the new one goes first.
    name, value = ("fp32_precision", "tf32") if hasattr(backend, "fp32_precision") else ("allow_tf32", True)
    before = getattr(backend, name)
    setattr(backend, name, value)
    try:
        yield
    finally:
        setattr(backend, name, before)
