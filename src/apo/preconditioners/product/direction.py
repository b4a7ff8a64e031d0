"""The interface of the product P g and of its pull-back to the factors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from apo.preconditioners.step import Groups

__all__ = ["Direction"]


class Direction(ABC):
    """P g for all parameters, in one of three ways with the same result.

    ``LayerByLayer`` is the simplest, and can distribute the work among processes. ``Bundled`` computes similar layers
    together. ``Replayed`` does the same in a CUDA graph. The optimizer chooses the fastest that applies.
    """

    @abstractmethod
    def directions(self, groups: Groups) -> dict[Tensor, Tensor]:
        """Return P g for every parameter that has a gradient; g includes coupled weight decay.

        Args:
            groups: The optimizer's param groups.
        """

    @abstractmethod
    def displacements(self, groups: Groups) -> dict[Tensor, Tensor]:
        """Return -P g in the same way, and remember what :meth:`pull_back` needs."""

    @abstractmethod
    def pull_back(self, cotangents: Mapping[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
        r"""Return the gradient of :math:`\sum_i \langle h_i, \Delta_i \rangle`, by layer and factor.

        :math:`\Delta_i` are the last :meth:`displacements`. Layers without gradients may be left out.

        Args:
            cotangents: :math:`h_i` for each parameter of the displacements.
        """

    @abstractmethod
    def observe(self, groups: Groups, sampled: Mapping[Tensor, Tensor] | None = None) -> None:
        """Take gradients into the statistics of the blocks.

        Args:
            groups: The optimizer's param groups.
            sampled: Gradients at sampled targets, by parameter; None for those in ``.grad``, with coupled weight decay.
        """

    @abstractmethod
    def mean_eigenvalues(self) -> dict[str, Tensor]:
        """Return the mean eigenvalue of each layer's block, as 0-dimensional tensors by layer name."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what was remembered."""
