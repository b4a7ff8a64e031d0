"""What the tests of all frameworks share: the plain loop that they are held against, and comparisons."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

import apo


def example(name: str) -> ModuleType:
    """Imports one of the project's examples."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_loop(model: nn.Module, epochs: list[list[tuple[Tensor, Tensor]]], accumulate: int = 1) -> apo.Tuner:
    """Trains as the examples on the digits do, without a framework; an epoch ends with a step in any case."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
    tuner = apo.attach(optimizer, model, criterion)
    for batches in epochs:
        for index, (x, y) in enumerate(batches, start=1):
            (criterion(model(x), y) / accumulate).backward()
            if index % accumulate == 0 or index == len(batches):
                optimizer.step()
                optimizer.zero_grad()
    return tuner


def assert_same_curves(one: apo.Tuner, other: apo.Tuner, tolerance: float = 1e-5) -> None:
    """Compares rate and loss at every meta-step."""
    assert len(one.history) == len(other.history) > 5
    for name in ("lr/0", "loss", "fsd"):
        torch.testing.assert_close(
            torch.tensor(one.history.column(name)), torch.tensor(other.history.column(name)), rtol=tolerance, atol=1e-9
        )


def assert_identical(one: nn.Module, other: nn.Module) -> None:
    """Compares all weights bit by bit."""
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def history_of(tuner: apo.Tuner) -> list[dict[str, float]]:
    """Returns every figure of every meta-step."""
    return [record.scalars() for record in tuner.history]
