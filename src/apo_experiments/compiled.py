"""A network whose training passes go through ``torch.compile``: fewer, larger kernels, the same mathematics."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import nn


@final
class CompiledNetwork(nn.Module):
    """Replaces a network in training; evaluation, with batches of another size, runs the network itself.

    Args:
        network: The network.
        backend: Of ``torch.compile``.
    """

    def __init__(self, network: nn.Module, backend: str = "inductor") -> None:
        super().__init__()
        self.network = network
        # A compiled function, because a compiled module would be a second module with the same weights.
        self._compiled = torch.compile(network.forward, backend=backend, dynamic=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network."""
        training = self.network.training and torch.is_grad_enabled()
        return (self._compiled if training else self.network)(*args, **kwargs)
