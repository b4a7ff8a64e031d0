"""VGG-16 without BatchNorm, for 32 x 32 images."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from apo_experiments.models.initialisation import initialise_he_
from apo_experiments.models.widths import scaled

#: Channels of the 3 x 3 convolutions of VGG-16 in blocks that end with a max-pool.
_BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@final
class VGG(nn.Module):
    """Thirteen 3 x 3 convolutions in five blocks and one linear layer 512-classes.

    Without normalisation a signal survives thirteen ReLU layers only with He's initialisation.
    """

    def __init__(self, classes: int = 10, channels: int = 3, width: float = 1.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for block in _BLOCKS:
            for outputs in scaled(block, width):
                layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU()]
                channels = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)
        initialise_he_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, channels, 32, 32]`` to logits ``[batch, classes]``."""
        return self.classifier(self.features(images).flatten(1))
