"""The discrepancy that belongs to a loss: a closed form for torch's losses, the Bregman divergence for any other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from apo.passes.operations import tree_map

from .base import Discrepancy, OutputSelector, comparable_pair, describe, paired_tensors
from .distances import HuberDistance, SquaredError
from .distributions import BernoulliKL, CategoricalKL, GaussianKL, PoissonKL


def for_loss(loss: Callable[..., Any], output: OutputSelector = None) -> Discrepancy:
    r"""Return the discrepancy that belongs to a torch loss; ``"auto"`` asks for it.

    ==============================================================  ====================================
    loss (function or module)                                       discrepancy
    ==============================================================  ====================================
    ``cross_entropy``, ``nll_loss``, ``kl_div`` ("batchmean")       ``CategoricalKL("torch")``
    ``binary_cross_entropy_with_logits``                            ``BernoulliKL("mean")``
    ``soft_margin_loss``, ``multilabel_soft_margin_loss``           ``BernoulliKL("mean")``
    ``binary_cross_entropy``                                        ``BernoulliKL("mean", of="probabilities")``
    ``mse_loss``                                                    ``SquaredError("mean")``
    ``l1_loss``                                                     ``HuberDistance(1, 1, "mean")``
    ``smooth_l1_loss``                                              ``HuberDistance(beta, 1, "mean")``
    ``huber_loss``                                                  ``HuberDistance(delta, delta, "mean")``
    ``poisson_nll_loss``                                            ``PoissonKL(log_input, "mean")``
    ``gaussian_nll_loss``                                           ``GaussianKL(None, "mean", of="variance")``
    ``multi_margin_loss``, ``multilabel_margin_loss``               ``SquaredError("mean")``
    ==============================================================  ====================================

    It is the Bregman divergence of the loss where that has one that does not depend on the targets. The robust losses
    and the margins have kinks, at which a Bregman divergence is zero or jumps: theirs is a distance in the outputs on
    the scale of the loss.

    Label smoothing adds a term that is linear in the logits, which leaves the divergence unchanged. Class weights,
    ``pos_weight`` and ``ignore_index`` do change it, but the discrepancy ignores them on purpose: it measures how far
    predictions move, whatever the targets are. Use a mask to exclude padding.

    Args:
        loss: One of the above, as a function, a ``functools.partial`` of it, or a module.
        output: See :class:`Discrepancy`.

    Raises:
        ValueError: If no closed form is known for the loss, or if the loss is summed over the batch.

    Example:
        >>> for_loss(nn.MSELoss()).reduction
        'mean'
    """
    options: dict[str, Any] = {}
    while isinstance(loss, functools.partial):
        loss, options = loss.func, loss.keywords | options
    if isinstance(loss, nn.Module):
        options = vars(loss) | options
        kinds = (kind for kind in type(loss).__mro__ if kind.__module__ == nn.MSELoss.__module__)
        name = next((kind.__name__ for kind in kinds), None)  # of torch's loss that this is, or derives from
    else:
        name = getattr(loss, "__name__", "")
        name = name if loss is getattr(functional, name, None) else None
    matching = _closed_form(name, options, output)
    if matching is None:
        shown = getattr(loss, "__name__", type(loss).__name__)
        raise ValueError(
            f'discrepancy must be given for the loss {shown}, got "auto": pass discrepancy=apo.Bregman(loss) '
            "if the loss is convex in the network's outputs, which is right for a loss of any scale, or "
            'discrepancy=apo.SquaredError("mean") if outputs and loss are of order one'
        )
    wanted = "batchmean" if name in ("KLDivLoss", "kl_div") else "mean"
    reduction = options.get("reduction", "mean")
    if reduction not in (wanted, "none"):  # without reduction, the loop takes the mean, with weights of its own
        raise ValueError(
            f'criterion must be a mean over the examples for discrepancy="auto", got reduction={reduction!r}: use '
            f'reduction="{wanted}", or pass discrepancy=apo.{matching!r} and fsd_weight=0.3 times the batch size'
        )
    return matching


def _closed_form(name: str | None, options: Mapping[str, Any], output: OutputSelector) -> Discrepancy | None:
    """Return the closed form for torch's loss of this name, a module's or a function's, if it has one."""
    match name:
        case "CrossEntropyLoss" | "cross_entropy" | "NLLLoss" | "nll_loss" | "KLDivLoss" | "kl_div":
            return CategoricalKL("torch", output)
        case "BCEWithLogitsLoss" | "binary_cross_entropy_with_logits" | "SoftMarginLoss" | "soft_margin_loss":
            return BernoulliKL("mean", output)
        case "MultiLabelSoftMarginLoss" | "multilabel_soft_margin_loss":
            return BernoulliKL("mean", output)
        case "BCELoss" | "binary_cross_entropy":
            return BernoulliKL("mean", output, of="probabilities")
        case "MSELoss" | "mse_loss" | "MultiMarginLoss" | "multi_margin_loss":
            return SquaredError("mean", output)
        case "MultiLabelMarginLoss" | "multilabel_margin_loss":
            return SquaredError("mean", output)
        case "L1Loss" | "l1_loss":
            return HuberDistance(reduction="mean", output=output)
        case "SmoothL1Loss" | "smooth_l1_loss":  # with a beta of zero it is the absolute error
            return HuberDistance(options.get("beta") or 1.0, reduction="mean", output=output)
        case "HuberLoss" | "huber_loss":
            return HuberDistance(options.get("delta", 1.0), options.get("delta", 1.0), "mean", output)
        case "PoissonNLLLoss" | "poisson_nll_loss":
            return PoissonKL(options.get("log_input", True), "mean", output)
        case "GaussianNLLLoss" | "gaussian_nll_loss":
            return GaussianKL(None, "mean", output, of="variance")
    return None


@final
class Bregman(Discrepancy):
    r"""Bregman divergence of an output loss: how far the loss is above its tangent at the old outputs.

    .. math:: \rho(z', z) = \ell(z', y) - \ell(z, y) - \langle \nabla_z \ell(z, y),\, z' - z \rangle

    for outputs :math:`z` and targets :math:`y`. If the loss :math:`\ell` is convex in the outputs, this is never
    negative. Its Hessian in :math:`z'` is that of the loss, so :math:`G` is the generalized Gauss-Newton matrix. Losses
    of exponential families have closed forms that need no targets; see :func:`for_loss`.

    Args:
        loss: The criterion itself, whatever its arguments, or another function or module ``loss(outputs, targets)``; it
            returns the mean over the examples.
        output: See :class:`Discrepancy`. Of the criterion itself leave it out: it is given what it was given in
            training. For any other loss it must select one tensor.

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

    def is_of(self, criterion: Callable[..., Any]) -> bool:
        """Return whether the loss is this criterion, or a module around it, and sees all that the criterion sees."""
        return self.output is None and criterion in (self.loss, getattr(self.loss, "function", None))

    def of_loss(self, loss: Callable[[Any], Tensor], new: Any, old: Any) -> Tensor:
        """Evaluate the divergence for all that the criterion takes from the network: tensors, or structures of them.

        Args:
            loss: The criterion as a function of that alone.
            new: What it took at the new weights.
            old: The same at the old weights.

        Returns:
            A scalar. Its gradient reaches the new outputs alone, not parameters of the criterion.
        """
        value, slopes = self._tangent(loss, new)
        old_value, old_slopes = self._tangent(loss, old)
        divergence = value - old_value
        for (moved, start), slope, old_slope in zip(paired_tensors(new, old), slopes, old_slopes, strict=True):
            still = moved.detach()
            divergence = (
                divergence - (old_slope * (still - start)).sum() + ((slope - old_slope) * (moved - still)).sum()
            )
        return divergence

    def _tangent(self, loss: Callable[[Any], Tensor], outputs: Any) -> tuple[Tensor, Sequence[Tensor]]:
        """Return a loss and its derivatives in all floating-point tensors among the outputs."""
        points: list[Tensor] = []

        def point(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            points.append(comparable_pair(tensor, tensor, "output")[1].clone().requires_grad_())
            return points[-1]

        # The outputs are constants for the caller, so the loss is differentiated on a separate graph.
        with torch.enable_grad():
            copies = tree_map(point, outputs)
            if not points:
                raise TypeError(
                    f"the network must return floating-point tensors for Bregman, got {describe(outputs)}: let it "
                    "return tensors, or a tuple, list or mapping of them, and make anything else in the criterion"
                )
            value = self._one_number(loss(copies))
            slopes = torch.autograd.grad(value, points, allow_unused=True, materialize_grads=True)
        return value.detach(), slopes

    def between(self, new: Any, old: Any, mask: Tensor | None, target: Any) -> Tensor:
        """Evaluate the divergence of one output tensor."""
        if target is None:
            raise ValueError(
                "target must be the targets of the FSD batch for Bregman, got None: use batches that have targets, or "
                "a closed form such as CategoricalKL"
            )
        for outputs in (new, old):
            if not (isinstance(outputs, Tensor) and outputs.is_floating_point()):
                raise TypeError(
                    f"output must select one floating-point tensor for Bregman, got {describe(outputs)}: "
                    'name the output to compare, such as discrepancy=apo.Bregman(loss, output="logits")'
                )
        new, old = comparable_pair(new, old, "output")
        if mask is not None:
            new, old, target = _chosen(new, mask), _chosen(old, mask), _chosen(target, mask)
            if new.shape[0] == 0:
                return new.sum()  # 0, with a graph; the mean of no losses would be NaN
        old_loss, (slope,) = self._tangent(lambda outputs: self.loss(outputs, target), old)
        return self._one_number(self.loss(new, target)) - old_loss - (slope * (new - old)).sum()

    @staticmethod
    def _one_number(value: Tensor) -> Tensor:
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
