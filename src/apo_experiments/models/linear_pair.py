"""A two-layer linear network for the badly conditioned regression."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn


@final
class LinearPair(nn.Module):
    r"""The network :math:`f(x) = W_2 W_1 x` without biases.

    Args:
        inputs: Dimension of x.
        hidden: Dimension of :math:`W_1 x`.
        outputs: Dimension of the output.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden, bias=False)
        self.second = nn.Linear(hidden, outputs, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[batch, inputs]`` to ``[batch, outputs]``."""
        return self.second(self.first(inputs))
