"""Residual networks for 32 x 32 images: the wide-stem ResNet-18/34, He's thin ResNet-32 and wide ones.

==========  =====================  =============  ===========================================  ==========
network     blocks                 channels       shortcut where the shape changes             weights
==========  =====================  =============  ===========================================  ==========
ResNet-18   2-2-2-2                64 to 512      1 x 1 convolution ("B" of He et al.)         11,173,962
ResNet-34   3-4-6-3                64 to 512      1 x 1 convolution                            21,282,122
ResNet-32   5-5-5                  16 to 64       every other pixel, zero channels ("A")       464,154
==========  =====================  =============  ===========================================  ==========
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from apo_experiments.models.parts import initialise_he_, scaled


@final
class ResNet(nn.Module):
    """A 3 x 3 stem, stages of basic blocks, global average pooling and a linear layer.

    Args:
        blocks: Number of blocks of each stage; every stage but the first halves the image.
        widths: Channels of each stage.
        shortcut: ``"convolution"`` or ``"pad"``, see the module's table.
        classes: Number of outputs.
        channels: Channels of the images.
        width: A factor on all widths.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        widths: Sequence[int],
        shortcut: str,
        classes: int = 10,
        channels: int = 3,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        widths = scaled(widths, width)
        self.stem = nn.Sequential(
            nn.Conv2d(channels, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        self.stages = _stages(functools.partial(_BasicBlock, shortcut), widths[0], widths, blocks)
        self.classifier = nn.Linear(widths[-1], classes)
        initialise_he_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, channels, height, width]`` to logits ``[batch, classes]``."""
        return self.classifier(self.stages(self.stem(images)).mean((2, 3)))


def _stages(
    block: Callable[[int, int, int], nn.Module], inputs: int, widths: Sequence[int], counts: Sequence[int]
) -> nn.Sequential:
    """Return blocks in stages, all of which but the first begin with a stride of 2."""
    found: list[nn.Module] = []
    for stage, (count, outputs) in enumerate(zip(counts, widths, strict=True)):
        for index in range(count):
            found.append(block(inputs, outputs, 2 if stage > 0 and index == 0 else 1))
            inputs = outputs
    return nn.Sequential(*found)


class _BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm around a shortcut."""

    def __init__(self, shortcut: str, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = (
                _PaddedShortcut(outputs - inputs, stride)
                if shortcut == "pad"
                else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))
            )

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.residual(inputs) + self.shortcut(inputs))


class _PaddedShortcut(nn.Module):
    """Take every ``stride``-th pixel and add channels of zeros, half in front and half behind."""

    def __init__(self, missing: int, stride: int) -> None:
        super().__init__()
        self.front, self.behind = missing // 2, missing - missing // 2
        self.stride = stride

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.pad(inputs[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.front, self.behind))


#: ResNet-18 and ResNet-34 in their form for small images.
resnet18 = functools.partial(ResNet, (2, 2, 2, 2), (64, 128, 256, 512), "convolution")
resnet34 = functools.partial(ResNet, (3, 4, 6, 3), (64, 128, 256, 512), "convolution")
#: The thin ResNet-32 of He et al. with parameter-free shortcuts.
resnet32 = functools.partial(ResNet, (5, 5, 5), (16, 32, 64), "pad")


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
        self.blocks = _stages(_WideBlock, inputs, stages, [(depth - 4) // 6] * 3)
        self.norm = nn.BatchNorm2d(stages[-1])
        self.classifier = nn.Linear(stages[-1], classes)
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
