"""Helpers that evaluations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 8192


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode, without gradients, and restore the mode of every module afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def mean_over(
    model: nn.Module,
    measures: Callable[[Tensor, Any], Tensor],
    inputs: Tensor,
    targets: Tensor,
    prepare: Callable[[Tensor], Tensor] | None = None,
    chunk: int = _CHUNK,
) -> list[float]:
    """Average measures over a data set that does not fit through the network at once.

    Args:
        model: The network; it is put into evaluation mode.
        measures: From outputs and targets of some examples to the means of one or several measures, ``[measures]``.
        inputs: ``[N, ...]``.
        targets: ``[N, ...]``.
        prepare: Applied to inputs before the network.
        chunk: How many examples at a time.

    Returns:
        The mean of each measure over all N examples; the host waits for the device once.
    """
    sums = []
    with evaluating(model):
        for start in range(0, len(inputs), chunk):
            part, target = inputs[start : start + chunk], targets[start : start + chunk]
            output = model(part if prepare is None else prepare(part))
            sums.append(measures(output, target).double() * len(part))
    return (torch.stack(sums).sum(0) / len(inputs)).tolist()
