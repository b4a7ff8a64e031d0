"""The product P g from the gradients that the parameters have, and its pull-back to the factors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from apo.preconditioners.step import Groups

__all__ = ["Direction"]


class Direction(ABC):
    """P g for all parameters; the optimizer chooses the fastest way.

    There are three ways with the same result: ``LayerByLayer`` is the obvious one, and the one where processes share
    the work; ``Bundled`` computes similar layers together; ``Replayed`` does that as a CUDA graph.
    """

    @abstractmethod
    def directions(self, groups: Groups) -> dict[Tensor, Tensor]:
        """Return P g for every parameter that has a gradient; g includes coupled weight decay.

        Args:
            groups: The optimizer's param groups.
        """

    @abstractmethod
    def displacements(self, groups: Groups) -> dict[Tensor, Tensor]:
        """Return -P g likewise, and remember what :meth:`pull_back` needs."""

    @abstractmethod
    def pull_back(self, cotangents: Mapping[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
        r"""Return the gradient of :math:`\sum_i \langle c_i, \Delta_i \rangle`, by layer and factor.

        :math:`\Delta` are the last :meth:`displacements`. Layers that took no part may be left out.

        Args:
            cotangents: For each parameter of the displacements.
        """

    @abstractmethod
    def mean_eigenvalues(self) -> dict[str, Tensor]:
        """Return the mean eigenvalue of each layer's block, as 0-dimensional tensors by the layer's name."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what was remembered."""
