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
    r"""Bregman divergence of an output loss: how far the loss lies above its tangent at the old outputs.

    .. math:: D(z', z) = L(z', t) - L(z, t) - \langle \nabla_z L(z, t),\, z' - z \rangle

    For a loss that is convex in the outputs it is never negative, and its Hessian in :math:`z'` is that of
    the loss: the Hessian :math:`G` of the FSD term is the generalized Gauss-Newton matrix of the cost. Losses
    of exponential families have closed forms that need no targets; see :func:`for_loss`.

    Args:
        loss: A function or module ``loss(outputs, targets)`` that returns the mean over the examples.
        output: See :class:`Discrepancy`; it must select one tensor.

    A mask picks examples by the leading dimensions that outputs and targets share; the loss then sees only
    those, with the masked dimensions flattened into one.

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
            raise TypeError(f"loss must be a function loss(outputs, targets), but is {loss!r}; pass F.mse_loss.")
        self.loss = loss

    def between(self, new: Any, old: Any, mask: Tensor | None, target: Any) -> Tensor:
        """Evaluate the divergence of one output tensor."""
        if target is None:
            raise ValueError(
                "Bregman evaluates its loss and needs target=..., the targets of the FSD batch; give batches "
                "that have them, or use a closed form such as CategoricalKL."
            )
        new, old = comparable_pair(single_tensor(new, "Bregman"), single_tensor(old, "Bregman"), "output")
        if mask is not None:
            new, old, target = _chosen(new, mask), _chosen(old, mask), _chosen(target, mask)
            if new.shape[0] == 0:
                return new.sum()
        # `old` is a constant of the outer graph: its loss and gradient are taken on a graph of their own.
        with torch.enable_grad():
            old = old.requires_grad_()
            old_loss = self._scalar_loss(old, target)
            (slope,) = torch.autograd.grad(old_loss, old)
        return self._scalar_loss(new, target) - old_loss.detach() - (slope * (new - old.detach())).sum()

    def _scalar_loss(self, outputs: Tensor, target: Any) -> Tensor:
        value = self.loss(outputs, target)
        if value.ndim != 0:
            raise ValueError(
                f"Bregman needs a loss that returns one number, but it returned shape {tuple(value.shape)}; "
                'use reduction="mean".'
            )
        return value


def _chosen(tensor: Any, mask: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor) or tensor.shape[: mask.ndim] != mask.shape:
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, but Bregman's outputs or targets have {shape}; pass a mask "
            "over their leading dimensions."
        )
    return tensor[mask]
