"""LeNet-5 for 32 x 32 images."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from apo_experiments.models.widths import scaled


@final
class LeNet(nn.Module):
    """Two 5 x 5 convolutions (6 and 16 channels), each with a max-pool, and 120-84-classes; 62,006 weights."""

    def __init__(self, classes: int = 10, channels: int = 3, width: float = 1.0, size: int = 32) -> None:
        super().__init__()
        if size < 16:
            raise ValueError(f"size must be at least 16 for two 5 x 5 convolutions with pools, got {size}")
        first, second, third, fourth = scaled([6, 16, 120, 84], width)
        side = ((size - 4) // 2 - 4) // 2
        self.features = nn.Sequential(
            nn.Conv2d(channels, first, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(second * side * side, third),
            nn.ReLU(),
            nn.Linear(third, fourth),
            nn.ReLU(),
            nn.Linear(fourth, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, channels, size, size]`` to logits ``[batch, classes]``."""
        return self.classifier(self.features(images).flatten(1))
