"""Networks whose parameters, activations and gradients have 16 bits."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from apo_experiments.errors import choose

#: Automatic mixed precision does not change the network; the training step applies it.
_NUMBER_TYPES = {
    "float32": torch.float32,
    "bf16-autocast": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def number_type(precision: str) -> torch.dtype:
    """Return the type of a network's parameters."""
    return _NUMBER_TYPES[choose("precision", precision, _NUMBER_TYPES)]


def in_precision(model: nn.Module, precision: str) -> nn.Module:
    """Return the network with parameters of a precision; what it returns stays float32."""
    dtype = number_type(precision)
    return model if dtype == torch.float32 else SixteenBit(model, dtype)


@final
class SixteenBit(nn.Module):
    """A network in 16 bits that takes inputs of any precision and returns float32, so that a loss is exact."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model.to(dtype)
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Any:
        """Cast, run, cast back."""
        return self.model(inputs.to(self.dtype)).float()
