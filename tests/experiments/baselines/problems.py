"""Small networks in float64 with dense oracles of their curvature."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["convolutional", "empirical_score", "example_gradients", "layer_matrix", "linear"]


def linear() -> tuple[nn.Module, Tensor, Tensor]:
    """A multi-layer perceptron and a batch of 12 examples in 3 classes."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return network, torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))


def convolutional() -> tuple[nn.Module, Tensor, Tensor]:
    """Two convolutions with stride, padding and dilation, one without bias, and a linear layer."""
    torch.manual_seed(4)
    network = nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 2, 2, dilation=2, bias=False),
        nn.Flatten(),
        nn.Linear(8, 3),
    ).double()
    return network, torch.randn(7, 2, 8, 8, dtype=torch.float64), torch.randint(3, (7,))


def empirical_score(output: Tensor, target: Tensor) -> Tensor:
    """The gradient of the summed cross-entropy with respect to the logits."""
    return output.softmax(-1).detach() - functional.one_hot(target, output.shape[-1])


def layer_matrix(layer: nn.Linear | nn.Conv2d, gradients: dict[str, Tensor]) -> Tensor:
    """Gradients of weight and bias ``[examples, out, in (+ 1)]``."""
    weight = gradients["weight"].flatten(2)
    return weight if layer.bias is None else torch.cat([weight, gradients["bias"].unsqueeze(-1)], dim=-1)


def example_gradients(network: nn.Module, inputs: Tensor, target: Tensor, name: str) -> Tensor:
    """The gradient of each example's cross-entropy with respect to one layer, by one backward pass an example."""
    layer = network.get_submodule(name)
    rows: dict[str, list[Tensor]] = {key: [] for key, _ in layer.named_parameters()}
    for index in range(len(inputs)):
        loss = functional.cross_entropy(network(inputs[index : index + 1]), target[index : index + 1])
        for key, gradient in zip(rows, torch.autograd.grad(loss, list(layer.parameters())), strict=True):
            rows[key].append(gradient)
    return layer_matrix(layer, {key: torch.stack(value) for key, value in rows.items()})  # type: ignore[arg-type]
