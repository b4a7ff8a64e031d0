"""The discrepancy that matches a torch loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn import functional

from .base import Discrepancy
from .bernoulli import BernoulliKL
from .categorical import CategoricalKL
from .outputs import OutputSelector
from .squared_error import SquaredError


def for_loss(loss: Callable[..., Any], output: OutputSelector = None) -> Discrepancy:
    r"""Return the closed-form Bregman divergence of a torch loss.

    ==================================================  ========================
    loss (function or module)                           discrepancy
    ==================================================  ========================
    ``cross_entropy``, ``nll_loss``                     ``CategoricalKL("torch")``
    ``binary_cross_entropy_with_logits``                ``BernoulliKL("mean")``
    ``mse_loss``                                        ``SquaredError("mean")``
    ==================================================  ========================

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
    options: dict[str, Any] = {}
    function = loss
    if isinstance(loss, functools.partial):
        options, function = loss.keywords, loss.func
    options = vars(loss) if isinstance(loss, nn.Module) else options
    discrepancy: Discrepancy
    if function in (functional.cross_entropy, functional.nll_loss) or isinstance(
        function, (nn.CrossEntropyLoss, nn.NLLLoss)
    ):
        discrepancy = CategoricalKL(dim="torch", output=output)
    elif function is functional.binary_cross_entropy_with_logits or isinstance(function, nn.BCEWithLogitsLoss):
        discrepancy = BernoulliKL(reduction="mean", output=output)
    elif function is functional.mse_loss or isinstance(function, nn.MSELoss):
        discrepancy = SquaredError(reduction="mean", output=output)
    else:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"the loss must have a known closed-form discrepancy, got {name}: pass discrepancy=..., one of "
            "CategoricalKL, BernoulliKL, GaussianKL, SquaredError, or Bregman(loss) for a convex loss"
        )
    reduction = options.get("reduction", "mean")
    if reduction != "mean":
        raise ValueError(
            f"the loss must have reduction='mean', as the discrepancy does, got {reduction!r}: change it, or pass "
            "discrepancy=... and a matching fsd_weight=..."
        )
    return discrepancy
