"""Multi-layer perceptrons: 2 x 100 ReLU units for UCI, 2 x 1000 for MNIST."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import final

from torch import Tensor, nn

#: Activations by name.
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
}


@final
class MLP(nn.Module):
    """Fully connected layers with an activation between them; inputs of any shape are flattened.

    ``sizes`` are the widths of the input, of each hidden layer and of the output.
    """

    def __init__(self, sizes: Sequence[int], activation: str = "relu") -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError(f"sizes must name at least an input and an output width, got {list(sizes)}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), ACTIVATIONS[activation]()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[batch, ...]`` to ``[batch, sizes[-1]]``."""
        return self.layers(inputs.flatten(1))
