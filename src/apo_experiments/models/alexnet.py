"""AlexNet in its small form for 32 x 32 images."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from apo_experiments.models.widths import scaled


@final
class AlexNet(nn.Module):
    """Five convolutions (64-192-384-256-256 channels) with three max-pools down to one pixel, then a classifier.

    Args:
        classes: Number of outputs.
        channels: Channels of the images.
        width: Multiplies every hidden width.
        head: ``"linear"`` for one linear layer, ``"hidden"`` for two hidden layers of 4,096 units with dropout.
        dropout: Of the hidden layers of the head.
    """

    def __init__(
        self, classes: int = 10, channels: int = 3, width: float = 1.0, head: str = "linear", dropout: float = 0.5
    ) -> None:
        super().__init__()
        if head not in ("linear", "hidden"):
            raise ValueError(f"head must be 'linear' or 'hidden', got {head!r}")
        a, b, c, d, e, units = scaled([64, 192, 384, 256, 256, 4096], width)
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
        self.classifier = nn.Linear(e, classes) if head == "linear" else _hidden_head(e, units, classes, dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, channels, 32, 32]`` to logits ``[batch, classes]``."""
        return self.classifier(self.features(images).flatten(1))


def _hidden_head(features: int, units: int, classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Dropout(dropout),
        nn.Linear(features, units),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(units, units),
        nn.ReLU(),
        nn.Linear(units, classes),
    )
