"""Plain convolutional networks for 32 x 32 images: LeNet-5, AlexNet in its small form, VGG-16 without BatchNorm."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from apo_experiments.models.parts import initialise_he_, scaled


class _Convolutional(nn.Module):
    """Features, and a classifier on top of them."""

    features: nn.Sequential
    classifier: nn.Module

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, channels, height, width]`` to logits ``[batch, classes]``."""
        return self.classifier(self.features(images).flatten(1))


@final
class LeNet(_Convolutional):
    """Two 5 x 5 convolutions (6 and 16 channels), each with a max-pool, and 120-84-classes; 62,006 weights."""

    def __init__(self, classes: int = 10, channels: int = 3, width: float = 1.0, size: int = 32) -> None:
        super().__init__()
        if size < 16:
            raise ValueError(f"size must be at least 16 for two 5 x 5 convolutions with pools, got {size}")
        first, second, third, fourth = scaled([6, 16, 120, 84], width)
        side = ((size - 4) // 2 - 4) // 2
        self.features = nn.Sequential(*_layer(channels, first, 5, pool=True), *_layer(first, second, 5, pool=True))
        self.classifier = nn.Sequential(
            *(nn.Linear(second * side * side, third), nn.ReLU(), nn.Linear(third, fourth), nn.ReLU()),
            nn.Linear(fourth, classes),
        )


@final
class AlexNet(_Convolutional):
    """Five convolutions (64-192-384-256-256 channels) with three max-pools down to one pixel, then one linear layer."""

    def __init__(self, classes: int = 10, channels: int = 3, width: float = 1.0) -> None:
        super().__init__()
        a, b, c, d, e = scaled([64, 192, 384, 256, 256], width)
        self.features = nn.Sequential(
            *_layer(channels, a, 11, pool=True, stride=4, padding=5),
            *_layer(a, b, 5, pool=True, padding=2),
            *_layer(b, c, 3, padding=1),
            *_layer(c, d, 3, padding=1),
            *_layer(d, e, 3, pool=True, padding=1),
        )
        self.classifier = nn.Linear(e, classes)


#: Channels of the 3 x 3 convolutions of VGG-16 in blocks that end with a max-pool.
_BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@final
class VGG(_Convolutional):
    """Thirteen 3 x 3 convolutions in five blocks and one linear layer 512-classes.

    Without normalisation a signal survives thirteen ReLU layers only with He's initialisation.
    """

    def __init__(self, classes: int = 10, channels: int = 3, width: float = 1.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for block in _BLOCKS:
            for place, outputs in enumerate(scaled(block, width), 1):
                layers += _layer(channels, outputs, 3, pool=place == len(block), padding=1)
                channels = outputs
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)
        initialise_he_(self)


def _layer(
    inputs: int, outputs: int, kernel: int, pool: bool = False, stride: int = 1, padding: int = 0
) -> list[nn.Module]:
    """Return a convolution, its activation and perhaps a max-pool."""
    return [nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU(), *([nn.MaxPool2d(2)] if pool else [])]
