"""Multi-layer perceptrons (2 x 100 ReLU units for UCI, 2 x 1000 for MNIST) and the deep autoencoder made of two."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import final

from torch import Tensor, nn

from apo_experiments.models.parts import initialise_sparsely_


@final
class MLP(nn.Module):
    """Fully connected layers with an activation between them; inputs of any shape are flattened.

    ``sizes`` are the widths of the input, of each hidden layer and of the output.
    """

    def __init__(self, sizes: Sequence[int], activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError(f"sizes must name at least an input and an output width, got {list(sizes)}")
        layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), activation())]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[batch, ...]`` to ``[batch, sizes[-1]]``."""
        return self.layers(inputs.flatten(1))


@final
class Autoencoder(nn.Module):
    """784-1000-500-250-30 sigmoid units and back: an encoder, its mirror image as decoder, a linear code between them.

    The output is logits: the loss is ``binary_cross_entropy_with_logits`` against pixels in [0, 1].

    Args:
        sizes: Widths from the input to the code.
        initialisation: ``"sparse"`` (as in the set-up of Martens and Grosse, 2015, that the paper follows: fifteen
            standard-normal incoming weights a unit, the others zero) or ``"default"`` (torch's).
    """

    def __init__(self, sizes: Sequence[int] = (784, 1000, 500, 250, 30), initialisation: str = "sparse") -> None:
        super().__init__()
        if initialisation not in ("sparse", "default"):
            raise ValueError(f"initialisation must be 'sparse' or 'default', got {initialisation!r}")
        self.encoder, self.decoder = MLP(list(sizes), nn.Sigmoid), MLP(list(sizes)[::-1], nn.Sigmoid)
        if initialisation == "sparse":
            initialise_sparsely_(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[batch, ...]`` to logits ``[batch, pixels]``."""
        return self.decoder(self.encoder(inputs))
