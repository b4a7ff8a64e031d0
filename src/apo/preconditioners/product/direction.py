"""The product P g from the gradients that the parameters have, and its pull-back to the factors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from apo.preconditioners.plan import Layer

__all__ = ["Direction", "Groups", "initial_steps", "Rates"]

Groups = Sequence[Mapping[str, Any]]
Rates = dict[Tensor, float]


class Direction(ABC):
    """P g for all parameters, by whatever way is fastest.

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


def initial_steps(layers: Sequence[Layer], groups: Groups) -> tuple[Rates, Rates]:
    r"""Return for each parameter the factors on the two sides of its layer's block.

    Parameters of one layer may be in groups of different step sizes; the roots of these then stand on both sides of P,
    which stays symmetric. One common size needs one side only.

    Returns:
        The factors on the gradient (parameters whose factor is one are left out) and those on the product.
    """
    after = {p: float(group["initial_step"]) for group in groups for p in group["params"]}
    before: Rates = {}
    if len(set(after.values())) > 1:
        for layer in layers:
            if len({after[p] for p in layer.params}) > 1:
                roots = {p: after[p] ** 0.5 for p in layer.params}
                before |= roots
                after |= roots
    return before, after
