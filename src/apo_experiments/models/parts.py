"""What networks share: initial weights other than torch's own, and widths that a factor scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def initialise_he_(network: nn.Module) -> None:
    """Give convolutions He's normal initialisation (by outgoing connections) and zero biases."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@torch.no_grad()
def initialise_sparsely_(network: nn.Module, incoming: int = 15) -> None:
    """Give every unit of every linear layer a few standard-normal incoming weights, the others zero (Martens, 2010)."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            count = min(incoming, module.in_features)
            chosen = torch.rand(module.weight.shape).topk(count).indices
            module.weight.zero_().scatter_(1, chosen, torch.randn(module.out_features, count))
            module.bias.zero_()


def scaled(widths: Sequence[int], factor: float) -> list[int]:
    """Multiply widths by a factor, to at least one unit each."""
    if not factor > 0:
        raise ValueError(f"width must be a positive factor, got {factor}")
    return [max(1, round(width * factor)) for width in widths]
