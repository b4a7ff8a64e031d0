"""Wide residual networks (Zagoruyko and Komodakis, 2016): WRN-28-10 and WRN-16-8."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from apo_experiments.models.initialisation import initialise_he_
from apo_experiments.models.widths import scaled


@final
class WideResNet(nn.Module):
    """Pre-activation residual network with wide stages; WRN-28-10 has 36.5 million weights.

    It has ``depth`` = 6 n + 4 convolutional layers, and stages of 16-32-64 channels times ``widen``.
    """

    def __init__(self, depth: int, widen: int, classes: int = 10, channels: int = 3, width: float = 1.0) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth must be 6 n + 4 for a whole n of at least 1 (10, 16, 22, 28, ...), got {depth}")
        inputs, *stages = scaled([16, 16 * widen, 32 * widen, 64 * widen], width)
        self.stem = nn.Conv2d(channels, inputs, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        for stage, outputs in enumerate(stages):
            for index in range((depth - 4) // 6):
                blocks.append(_WideBlock(inputs, outputs, 2 if stage > 0 and index == 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(inputs)
        self.classifier = nn.Linear(inputs, classes)
        initialise_he_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, channels, height, width]`` to logits ``[batch, classes]``."""
        features = torch.relu(self.norm(self.blocks(self.stem(images))))
        return self.classifier(features.mean((2, 3)))


class _WideBlock(nn.Module):
    """BatchNorm and ReLU before each of two 3 x 3 convolutions; the shortcut branches off after the first pair."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        )
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        active = torch.relu(self.norm(inputs))
        shortcut = inputs if self.shortcut is None else self.shortcut(active)
        return shortcut + self.residual(active)
