"""The discrepancy that matches a torch loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn import functional

from .base import Discrepancy
from .bernoulli import BernoulliKL
from .categorical import CategoricalKL
from .gaussian import GaussianKL
from .huber import HuberDistance
from .outputs import OutputSelector
from .poisson import PoissonKL
from .squared_error import SquaredError


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
        ValueError: If no closed form is known for the loss, or if the loss is not averaged over the batch.

    Example:
        >>> for_loss(nn.MSELoss()).reduction
        'mean'
    """
    function, options = _unwrapped(loss)
    name = _name_in_torch(function)
    build = _CLOSED_FORMS.get(name or "")
    if build is None:
        raise ValueError(
            f'discrepancy must be given for the loss {_name(function)}, got "auto": pass discrepancy=apo.Bregman(loss) '
            'if the loss is convex in the outputs, or discrepancy=apo.SquaredError("mean") for any outputs of order one'
        )
    wanted = "batchmean" if name in ("KLDivLoss", "kl_div") else "mean"
    reduction = options.get("reduction", "mean")
    if reduction != wanted:
        raise ValueError(
            f'criterion must be a mean over the examples for discrepancy="auto", got reduction={reduction!r}: use '
            f'reduction="{wanted}", or pass discrepancy=apo.{build(options, output)!r} and a fsd_weight on the scale '
            "of the loss"
        )
    return build(options, output)


def _unwrapped(loss: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the loss itself and its options."""
    if isinstance(loss, functools.partial):
        function, options = _unwrapped(loss.func)
        return function, options | loss.keywords
    return loss, vars(loss) if isinstance(loss, nn.Module) else {}


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _name_in_torch(function: Callable[..., Any]) -> str | None:
    """Return the name of torch's loss that this is, or derives from."""
    if isinstance(function, nn.Module):
        kinds = (kind for kind in type(function).__mro__ if kind.__module__ == nn.MSELoss.__module__)
        return next((kind.__name__ for kind in kinds), None)
    name = _name(function)
    return name if function is getattr(functional, name, None) else None


def _categorical(options: Mapping[str, Any], output: OutputSelector) -> Discrepancy:
    return CategoricalKL(dim="torch", output=output)


def _bernoulli(options: Mapping[str, Any], output: OutputSelector) -> Discrepancy:
    return BernoulliKL(reduction="mean", output=output)


def _bernoulli_of_probabilities(options: Mapping[str, Any], output: OutputSelector) -> Discrepancy:
    return BernoulliKL(reduction="mean", output=output, of="probabilities")


def _squared(options: Mapping[str, Any], output: OutputSelector) -> Discrepancy:
    return SquaredError(reduction="mean", output=output)


def _absolute(options: Mapping[str, Any], output: OutputSelector) -> Discrepancy:
    return HuberDistance(reduction="mean", output=output)


def _smooth_absolute(options: Mapping[str, Any], output: OutputSelector) -> Discrepancy:
    # With a beta of zero it is the absolute error.
    return HuberDistance(options.get("beta") or 1.0, reduction="mean", output=output)


def _huber(options: Mapping[str, Any], output: OutputSelector) -> Discrepancy:
    delta = options.get("delta", 1.0)
    return HuberDistance(delta, delta, reduction="mean", output=output)


def _poisson(options: Mapping[str, Any], output: OutputSelector) -> Discrepancy:
    return PoissonKL(options.get("log_input", True), reduction="mean", output=output)


def _gaussian(options: Mapping[str, Any], output: OutputSelector) -> Discrepancy:
    return GaussianKL(reduction="mean", output=output, of="variance")


_CLOSED_FORMS: dict[str, Callable[[Mapping[str, Any], OutputSelector], Discrepancy]] = {
    "CrossEntropyLoss": _categorical,
    "cross_entropy": _categorical,
    "NLLLoss": _categorical,
    "nll_loss": _categorical,
    "KLDivLoss": _categorical,
    "kl_div": _categorical,
    "BCEWithLogitsLoss": _bernoulli,
    "binary_cross_entropy_with_logits": _bernoulli,
    "SoftMarginLoss": _bernoulli,
    "soft_margin_loss": _bernoulli,
    "MultiLabelSoftMarginLoss": _bernoulli,
    "multilabel_soft_margin_loss": _bernoulli,
    "BCELoss": _bernoulli_of_probabilities,
    "binary_cross_entropy": _bernoulli_of_probabilities,
    "MSELoss": _squared,
    "mse_loss": _squared,
    "MultiMarginLoss": _squared,
    "multi_margin_loss": _squared,
    "MultiLabelMarginLoss": _squared,
    "multilabel_margin_loss": _squared,
    "L1Loss": _absolute,
    "l1_loss": _absolute,
    "SmoothL1Loss": _smooth_absolute,
    "smooth_l1_loss": _smooth_absolute,
    "HuberLoss": _huber,
    "huber_loss": _huber,
    "PoissonNLLLoss": _poisson,
    "poisson_nll_loss": _poisson,
    "GaussianNLLLoss": _gaussian,
    "gaussian_nll_loss": _gaussian,
}
