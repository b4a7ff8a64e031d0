"""The deep autoencoder on MNIST: 784-1000-500-250-30 and back, sigmoid units, a Bernoulli likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn

from apo_experiments.models.initialisation import initialise_sparsely_
from apo_experiments.models.mlp import MLP


@final
class Autoencoder(nn.Module):
    """An encoder, its mirror image as decoder, and a linear code between them.

    The output is logits: the loss is ``binary_cross_entropy_with_logits`` against pixels in [0, 1].

    Args:
        sizes: Widths from the input to the code.
        activation: Of every layer but the code and the output.
        initialisation: ``"sparse"`` (as in the set-up of Martens and Grosse, 2015, that the paper follows: fifteen
            standard-normal incoming weights a unit, the others zero) or ``"default"`` (torch's).
    """

    def __init__(
        self,
        sizes: Sequence[int] = (784, 1000, 500, 250, 30),
        activation: str = "sigmoid",
        initialisation: str = "sparse",
    ) -> None:
        super().__init__()
        if initialisation not in ("sparse", "default"):
            raise ValueError(f"initialisation must be 'sparse' or 'default', got {initialisation!r}")
        self.encoder = MLP(list(sizes), activation)
        self.decoder = MLP(list(sizes)[::-1], activation)
        if initialisation == "sparse":
            initialise_sparsely_(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[batch, ...]`` to logits ``[batch, pixels]``."""
        return self.decoder(self.encoder(inputs))
