"""AlexNet in its small form for 32 x 32 images."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from apo_experiments.models.widths import scaled


@final
class AlexNet(nn.Module):
    """Five convolutions (64-192-384-256-256 channels) with three max-pools down to one pixel, then one linear layer."""

    def __init__(self, classes: int = 10, channels: int = 3, width: float = 1.0) -> None:
        super().__init__()
        a, b, c, d, e = scaled([64, 192, 384, 256, 256], width)
        self.features = nn.Sequential(
            nn.Conv2d(channels, a, 11, stride=4, padding=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(a, b, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(b, c, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(c, d, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(d, e, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(e, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, channels, 32, 32]`` to logits ``[batch, classes]``."""
        return self.classifier(self.features(images).flatten(1))
