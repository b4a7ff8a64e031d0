"""What is trained: a residual network with BatchNorm on images, and an MLP. The data are random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from apo_experiments.models import resnet18

Batch = tuple[Tensor, Tensor]
CLASSES = 10


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def residual_network(width: int) -> nn.Module:
    """Return a ResNet-8 for CIFAR-sized images, as in He et al. (2016), section 4.2, with one block a stage."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        ResidualBlock(width, width, 1),
        ResidualBlock(width, 2 * width, 2),
        ResidualBlock(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, CLASSES),
    )


def mlp(inputs: int, width: int) -> nn.Module:
    """Return the network of the paper's MNIST experiments: two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


class InBFloat16(nn.Module):
    """Runs a convolutional network under autocast, in the memory format that tensor cores like."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.network(x.contiguous(memory_format=torch.channels_last)).float()


@dataclass(frozen=True)
class Workload:
    """A network and the shape of its batches.

    Attributes:
        name: Its name in the cases.
        network: Builds the network.
        batch_shape: Shape of the inputs.
        large: Whether other second-order optimizers are compared on it as well.
    """

    name: str
    network: Callable[[], nn.Module]
    batch_shape: tuple[int, ...]
    large: bool = False

    def model(self, device: torch.device) -> nn.Module:
        """Return a network with the same initial weights every time."""
        torch.manual_seed(0)
        return self.network().to(device)

    def batches(self, device: torch.device, fresh: bool = False) -> Iterator[Batch]:
        """Return the same endless stream of batches every time.

        The inputs repeat after 7 batches and the targets after 11, so an input meets ever other targets: the loss
        cannot be learned away, which would leave tiny numbers that some processors are slow with.

        Args:
            device: Where they live.
            fresh: Make new tensors each time, as a data loader does: keeping one costs its memory.
        """
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(self.batch_shape, generator=generator).to(device) for _ in range(7)]
        targets = [torch.randint(CLASSES, self.batch_shape[:1], generator=generator).to(device) for _ in range(11)]
        pairs = ((inputs[i % 7], targets[i % 11]) for i in count())
        return ((x.clone(), y.clone()) for x, y in pairs) if fresh else pairs


#: The sizes are for two CPU cores: about 30 ms a step of the CNN, 1 ms of the MLP.
CPU_WORKLOADS = (
    Workload("cnn", lambda: residual_network(16), (64, 3, 32, 32)),
    Workload("mlp", lambda: mlp(784, 200), (100, 784)),
)
#: A GPU needs more work a step, or the time to launch kernels is all that one sees.
CUDA_WORKLOADS = (
    Workload("cnn", lambda: residual_network(64), (512, 3, 32, 32)),
    Workload("mlp", lambda: mlp(784, 4096), (4096, 784)),
    Workload("resnet18", lambda: InBFloat16(resnet18(CLASSES, 3, 1.0)), (128, 3, 32, 32), large=True),
    # Small batches have the GPU wait for the host, so that what one sees is Python: four times the work for the same.
    Workload("resnet18-b512", lambda: InBFloat16(resnet18(CLASSES, 3, 1.0)), (512, 3, 32, 32), large=True),
)
#: Only to see that everything runs.
SMOKE_WORKLOADS = (
    Workload("cnn", lambda: residual_network(2), (4, 3, 8, 8)),
    Workload("mlp", lambda: mlp(12, 8), (8, 12)),
    Workload("resnet18", lambda: InBFloat16(resnet18(CLASSES, 3, 0.06)), (4, 3, 8, 8), large=True),
)
