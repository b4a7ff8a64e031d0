"""Training curves that were checked once and must not change unnoticed.

A change that is meant to alter the numbers writes them again, and says in the changelog by how much:

    PYTHONPATH=src python tests/golden/test_golden.py

Training is in float64, so that another machine's order of summation does not show within the tolerance.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apo

CURVES = Path(__file__).with_name("curves.json")
STEPS, BATCH = 60, 64

RULES: dict[str, Callable[[nn.Module], Any]] = {
    "learning rate of SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9),
    "learning rate of Adam": lambda model: torch.optim.Adam(model.parameters(), lr=10.0),
    "Kronecker preconditioner": lambda model: apo.Preconditioned(
        apo.Kronecker(model, lr=0.3, momentum=0.5), meta_optimizer=functools.partial(torch.optim.Adam, lr=0.01)
    ),
}


def digits() -> tuple[Tensor, Tensor]:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    return torch.from_numpy(images).double() / 16, torch.from_numpy(labels).long()


def train(name: str) -> dict[str, list[float]]:
    """Return the training loss of every step, and of every meta-step the objective and what was learned."""
    inputs, target = digits()
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    tuner = apo.APO(RULES[name](model), model, F.cross_entropy, interval=5)
    losses = []
    for _ in range(STEPS):
        chosen = torch.randint(len(inputs), (BATCH,), generator=generator)
        losses.append(float(tuner.step(inputs[chosen], target[chosen])))  # type: ignore[arg-type]
    figures = ("objective", "lr/0", *tuner.history[0].summary)
    return {"training loss": losses} | {figure: tuner.history.column(figure) for figure in figures}


@pytest.mark.parametrize("name", RULES)
def test_training_follows_the_golden_curve(name):
    golden = json.loads(CURVES.read_text())[name]
    for figure, values in train(name).items():
        assert values == pytest.approx(golden[figure], rel=1e-4), figure


@pytest.mark.parametrize("name", RULES)
def test_the_golden_curves_are_of_training_that_worked(name):
    losses = json.loads(CURVES.read_text())[name]["training loss"]
    assert len(losses) == STEPS
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


def regenerate() -> None:
    curves = {name: {k: [float(f"{x:.9g}") for x in v] for k, v in train(name).items()} for name in RULES}
    lines = [f'  "{name}": {json.dumps(curve)}' for name, curve in curves.items()]
    CURVES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    regenerate()
