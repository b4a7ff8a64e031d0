"""Helpers that evaluations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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


def judged(
    parts: Mapping[str, Part],
    measures: Measures,
    guess: float | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    chunk: int = 8192,
) -> Callable[[nn.Module], dict[str, float]]:
    """Return an evaluation: the mean of every measure over all examples of every part of the data.

    Args:
        parts: The data by name, such as ``test``, whose loss is ``test_loss``; of a part without name it is ``loss``.
        measures: What is measured.
        guess: The metric of a guess that does not look, which is reported too.
        prepare: Applied to inputs before the network.
        chunk: How many examples at a time.
    """

    def evaluate(model: nn.Module) -> dict[str, float]:
        found = {} if guess is None else {"guess": guess}
        for part, (inputs, targets) in parts.items():
            sums = []  # of as many examples as fit through the network at once
            with evaluating(model):
                for start in range(0, len(inputs), chunk):
                    some, target = inputs[start : start + chunk], targets[start : start + chunk]
                    output = model(some if prepare is None else prepare(some))
                    values = torch.stack([measure(output, target) for measure in measures.values()])
                    sums.append(values.double() * len(some))
            means = (torch.stack(sums).sum(0) / len(inputs)).tolist()  # waits for the device, once
            found |= {f"{part}_{name}".lstrip("_"): mean for name, mean in zip(measures, means, strict=True)}
        return found

    return evaluate
