"""The Bregman divergence of any convex output loss, which makes G the generalized Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from .base import Discrepancy
from .outputs import OutputSelector, comparable_pair, single_tensor


@final
class Bregman(Discrepancy):
    r"""Bregman divergence of an output loss: how far the loss is above its tangent at the old outputs.

    .. math:: \rho(z', z) = \ell(z', y) - \ell(z, y) - \langle \nabla_z \ell(z, y),\, z' - z \rangle

    for outputs :math:`z` and targets :math:`y`. If the loss :math:`\ell` is convex in the outputs, this is never
    negative. Its Hessian in :math:`z'` is that of the loss, so :math:`G` is the generalized Gauss-Newton matrix. Losses
    of exponential families have closed forms that need no targets; see :func:`for_loss`.

    Args:
        loss: A function or module ``loss(outputs, targets)`` that returns the mean over the examples.
        output: See :class:`Discrepancy`; it must select one tensor.

    A mask selects examples by the leading dimensions that outputs and targets share; the loss then sees only those,
    with the masked dimensions flattened into one.

    Example:
        >>> rho = Bregman(torch.nn.functional.mse_loss)
        >>> old, new, target = torch.zeros(4, 3), torch.full((4, 3), 2.0), torch.ones(4, 3)
        >>> round(rho(new, old, target=target).item(), 4)
        4.0
    """

    needs_target: ClassVar[bool] = True

    def __init__(self, loss: Callable[..., Tensor], output: OutputSelector = None) -> None:
        super().__init__(output)
        if not callable(loss):
            raise TypeError(f"loss must be a function loss(outputs, targets), got {loss!r}")
        self.loss = loss

    def between(self, new: Any, old: Any, mask: Tensor | None, target: Any) -> Tensor:
        """Evaluate the divergence of one output tensor."""
        if target is None:
            raise ValueError(
                "target must be the targets of the FSD batch for Bregman, got None: use batches that have targets, or "
                "a closed form such as CategoricalKL"
            )
        new, old = comparable_pair(single_tensor(new, "Bregman"), single_tensor(old, "Bregman"), "output")
        if mask is not None:
            new, old, target = _chosen(new, mask), _chosen(old, mask), _chosen(target, mask)
            if new.shape[0] == 0:
                return new.sum()  # 0, with a graph; the mean of no losses would be NaN
        # `old` is a constant for the caller, so its loss is differentiated on a separate graph.
        with torch.enable_grad():
            old = old.requires_grad_()
            old_loss = self._scalar_loss(old, target)
            (slope,) = torch.autograd.grad(old_loss, old)
        return self._scalar_loss(new, target) - old_loss.detach() - (slope * (new - old.detach())).sum()

    def _scalar_loss(self, outputs: Tensor, target: Any) -> Tensor:
        value = self.loss(outputs, target)
        if value.ndim != 0:
            raise ValueError(
                f"loss must return one number for Bregman, got shape {tuple(value.shape)}: use reduction='mean'"
            )
        return value


def _chosen(tensor: Any, mask: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor) or tensor.shape[: mask.ndim] != mask.shape:
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(
            f"mask must have the leading dimensions of Bregman's outputs and targets, got shape {tuple(mask.shape)} "
            f"for {shape}: pass one bool per example"
        )
    return tensor[mask]
