"""From a torch loss to the discrepancy that matches it."""

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

    Label smoothing changes the loss only by a term linear in the logits and leaves the divergence as it is.
    Class weights, ``pos_weight`` and ``ignore_index`` do change it; the discrepancy ignores them on purpose,
    because it measures how far predictions move, wherever the targets lie (exclude padding with a mask).

    Args:
        loss: One of the above, a ``functools.partial`` of a function among them, or the module form.
        output: See :class:`Discrepancy`.

    Returns:
        The matching discrepancy.

    Raises:
        ValueError: If no closed form is known for the loss, or it is not averaged over the batch.

    Example:
        >>> for_loss(nn.MSELoss()).reduction
        'mean'
    """
    options: dict[str, Any] = {}
    function = loss
    if isinstance(loss, functools.partial):
        options, function = loss.keywords, loss.func
    options = vars(loss) if isinstance(loss, nn.Module) else options
    discrepancy = _closed_form(function, output)
    if discrepancy is None:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"No closed-form discrepancy is known for the loss {name}; pass discrepancy=... with one of "
            "CategoricalKL, BernoulliKL, GaussianKL, SquaredError, or Bregman(loss) if it is convex."
        )
    reduction = options.get("reduction", "mean")
    if reduction != "mean":
        raise ValueError(
            f"The loss has reduction={reduction!r}, but the discrepancy is a mean over the examples; use "
            'reduction="mean", or pass discrepancy=... and a fsd_weight of your own.'
        )
    return discrepancy


def _closed_form(function: Callable[..., Any], output: OutputSelector) -> Discrepancy | None:
    if function in (functional.cross_entropy, functional.nll_loss) or isinstance(
        function, (nn.CrossEntropyLoss, nn.NLLLoss)
    ):
        return CategoricalKL(dim="torch", output=output)
    if function is functional.binary_cross_entropy_with_logits or isinstance(function, nn.BCEWithLogitsLoss):
        return BernoulliKL(reduction="mean", output=output)
    if function is functional.mse_loss or isinstance(function, nn.MSELoss):
        return SquaredError(reduction="mean", output=output)
    return None
