"""Frameworks put wrappers around optimizers, and schedulers around the wrappers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import apo

pytestmark = pytest.mark.integrations


class Wrapper(torch.optim.Optimizer):
    """What frameworks do: an optimizer by type, which passes everything on to the one inside."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure=None):
        self.optimizer.step(closure)


def train(model, optimizer, scheduler, steps):
    criterion = model.criterion
    for _ in range(steps):
        optimizer.optimizer.zero_grad()
        criterion(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
        optimizer.step()
        scheduler.step()


@pytest.fixture
def model():
    network = nn.Linear(4, 3)
    network.criterion = nn.CrossEntropyLoss()
    return network


@pytest.fixture
def optimizer(model):
    return Wrapper(torch.optim.SGD(model.parameters(), lr=1e-6))


@pytest.mark.parametrize(
    "build, factor",
    [
        (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step), 0.5**12),
        (lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), 0.5**12),
        (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.1), 0.1**2),
    ],
    ids=["LambdaLR", "ExponentialLR", "StepLR"],
)
def test_scheduler_built_on_a_wrapper_multiplies_the_learned_rate(model, optimizer, build, factor):
    tuner = apo.attach(optimizer.optimizer, model, model.criterion)
    scheduler = build(optimizer)
    train(model, optimizer, scheduler, 12)
    learned = tuner.rule.learned_rates()[0]
    assert learned > 1e-3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(learned * factor)


def test_scheduler_on_a_wrapper_is_still_known_after_a_checkpoint_was_loaded(model, optimizer):
    tuner = apo.attach(optimizer.optimizer, model, model.criterion)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.optimizer.load_state_dict(optimizer.optimizer.state_dict())
    train(model, optimizer, scheduler, 12)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(tuner.rule.learned_rates()[0] / 13)


def test_without_a_scheduler_a_written_rate_is_the_rate_in_force(model, optimizer):
    tuner = apo.attach(optimizer.optimizer, model, model.criterion)
    optimizer.param_groups[0]["lr"] = 0.25
    assert tuner.optimizer.param_groups[0]["lr"] == 0.25
