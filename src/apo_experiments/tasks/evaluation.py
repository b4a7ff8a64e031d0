"""Helpers that evaluations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 8192

#: Measures of outputs and targets, by name; each returns one number.
Measures = Mapping[str, Callable[[Tensor, Any], Tensor]]
#: Inputs and targets of one part of the data.
Part = tuple[Tensor, Tensor]


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


def judged(
    parts: Mapping[str, Part],
    measures: Measures,
    guess: float | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    chunk: int = _CHUNK,
) -> Callable[[nn.Module], dict[str, float]]:
    """Return an evaluation: every measure of every part of the data.

    Args:
        parts: The data by name, such as ``test``, whose loss is ``test_loss``; of a part without name it is ``loss``.
        measures: What is measured.
        guess: The metric of a guess that does not look, which is reported too.
        prepare: Applied to inputs before the network.
        chunk: How many examples at a time.
    """

    def together(output: Tensor, target: Any) -> Tensor:
        return torch.stack([measure(output, target) for measure in measures.values()])

    def evaluate(model: nn.Module) -> dict[str, float]:
        found = {} if guess is None else {"guess": guess}
        for part, data in parts.items():
            values = mean_over(model, together, *data, prepare, chunk)
            found |= {f"{part}_{name}".lstrip("_"): value for name, value in zip(measures, values, strict=True)}
        return found

    return evaluate
