"""How a GPU computes: switches of torch that change speed and, in the last digits, results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

#: Options that a task may have. ``tf32``: products of float32 numbers with 10 bits of mantissa, several times as fast.
#: ``cudnn_benchmark``: try the algorithms for a convolution and keep the fastest, so that a resumed run agrees with an
#: uninterrupted one up to rounding alone.
BACKENDS: dict[str, Any] = {"tf32": False, "cudnn_benchmark": True}


def configure(device: torch.device, options: Mapping[str, Any]) -> None:
    """Set the switches for the runs of this process; without CUDA there are none.

    Args:
        device: Where a run computes.
        options: Options of its task; what is not among them is as in :data:`BACKENDS`.
    """
    if device.type != "cuda":
        return
    chosen = {name: options.get(name, default) for name, default in BACKENDS.items()}
    # Torch itself would use TF32 for convolutions and not for other products, which no reader expects.
    for owner, name, on, off in _tf32_switches():
        setattr(owner, name, on if chosen["tf32"] else off)
    torch.backends.cudnn.benchmark = chosen["cudnn_benchmark"]


def described(device: torch.device) -> dict[str, bool]:
    """Return the switches as they are, for records."""
    if device.type != "cuda":
        return {}
    tf32 = all(getattr(owner, name) == on for owner, name, on, _ in _tf32_switches())
    return {"tf32": tf32, "cudnn_benchmark": bool(torch.backends.cudnn.benchmark)}


def _tf32_switches() -> list[tuple[Any, str, Any, Any]]:
    """Return the switches for convolutions and for other products: whose, the name, and the values for on and off."""
    products: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    if hasattr(products, "fp32_precision"):  # from torch 2.9 on; the old switches are not to be mixed with these
        return [(owner, "fp32_precision", "tf32", "ieee") for owner in (products, cudnn.conv)]
    return [(owner, "allow_tf32", True, False) for owner in (products, cudnn)]
