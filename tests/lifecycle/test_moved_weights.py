"""Weights that the loop moves between the pass and the step, as sharpness-aware minimisation does."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.lifecycle.harness import DOORS, Run
from torch import nn


class Counting(nn.Module):
    """Counts its passes, where a meta-step does not put the count back."""

    passes: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(6, 3)

    def forward(self, inputs):
        self.passes.append(len(inputs))
        return self.network(inputs)


def in_place(parameter, value):
    with torch.no_grad():
        parameter.copy_(value)


def as_data(parameter, value):
    parameter.data = value.clone()


def passes(run, x, y):
    if run.door == "explicit":
        run.tuner.backward(x, y)
    else:
        run.criterion(run.model(x), y).backward()


def step(run, x, y, put=None):
    """Take a step with the gradient where ``put`` has moved the weights to and from; without it, an ordinary one."""
    run.optimizer.zero_grad()
    theta = [p.detach().clone() for p in run.model.parameters()]
    if put is not None:
        for p in run.model.parameters():
            put(p, 1.5 * p.detach())
    passes(run, x, y)
    if put is not None:
        for p, value in zip(run.model.parameters(), theta, strict=True):
            put(p, value)
    run.tuner.step() if run.door == "explicit" else run.optimizer.step()


def build(door, **options):
    return Run(door, network=Counting, dtype=torch.float64, **({"interval": 1} | options))


@pytest.mark.parametrize("options", [{}, {"fsd_batch": "same"}])
@pytest.mark.parametrize("put", [in_place, as_data])
@pytest.mark.parametrize("door", DOORS)
def test_the_loss_at_theta_is_that_of_the_weights_which_the_step_leaves(door, put, options):
    run = build(door, **options)
    for index in range(4):
        x, y = run.batch(index)
        losses = [F.cross_entropy(run.model.network(z), t).item() for z, t in (run.batch(index), run.batch(index - 1))]
        step(run, x, y, put)
        share = run.tuner.objective.other_batch_share
        expected = (1 - share) * losses[0] + share * losses[1 if index else 0]
        assert run.tuner.history[-1].loss == pytest.approx(expected, rel=1e-9)
    if options:  # nothing has moved but by the look-ahead, so its function-space term is small
        assert run.tuner.history[-1].fsd < 1e-2


@pytest.mark.parametrize("door", DOORS)
def test_an_ordinary_loop_runs_no_pass_more(door):
    def count(put):
        run = build(door)
        for index in range(3):
            step(run, *run.batch(index), put)
        before = len(run.model.passes)
        step(run, *run.batch(3), put)
        return len(run.model.passes) - before

    assert count(None) == 4  # training's, B' at theta, B and B' at the look-ahead
    assert count(in_place) == 5


def test_a_closure_that_moves_the_weights_and_back_has_its_loss_at_theta():
    run = build("attached")
    x, y = run.batch(0)
    expected = F.cross_entropy(run.model.network(x), y).item()

    def closure():
        run.optimizer.zero_grad()
        theta = [p.detach().clone() for p in run.model.parameters()]
        for p in run.model.parameters():
            in_place(p, 1.5 * p)
        loss = run.criterion(run.model(x), y)
        loss.backward()
        for p, value in zip(run.model.parameters(), theta, strict=True):
            in_place(p, value)
        return loss

    run.optimizer.step(closure)
    assert run.tuner.history[-1].loss == pytest.approx(expected, rel=1e-9)
