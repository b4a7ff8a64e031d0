"""Scale the widths of a network, so that a smoke run has the same architecture at a fraction of its size."""

from __future__ import annotations

from collections.abc import Sequence


def scaled(widths: Sequence[int], factor: float) -> list[int]:
    """Multiply widths by a factor, to at least one unit each."""
    if not factor > 0:
        raise ValueError(f"width must be a positive factor, got {factor}")
    return [max(1, round(width * factor)) for width in widths]
