"""Losses that are computed by several calls of the criterion learn what they learn as one call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.loops.loop import Run, batches, mlp
from torch import nn

import apo

OPTIMIZERS = {
    "sgdm": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def two_tasks(make_optimizer, calls: int, weight: float) -> Run:
    """Train a network on a sum of sines and one of cosines, with one call of the criterion for each or one for both."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 8, generator=generator)
    sines, cosines = x[:, :4].sin().sum(1, keepdim=True), x[:, 4:].cos().sum(1, keepdim=True)

    def both(output, p, q):
        return F.mse_loss(output[:, :1], p) + weight * F.mse_loss(output[:, 1:], q)

    model, options = mlp(8, 2), {"total_steps": 300}
    optimizer, criterion = make_optimizer(model.parameters()), nn.MSELoss()
    if calls == 1:
        criterion, options = apo.criterion(both), options | {"discrepancy": apo.SquaredError("mean")}
    tuner, start = apo.attach(optimizer, model, criterion, **options), both(model(x), sines, cosines).item()
    for z, p, q in batches(300, x, sines, cosines):
        output = model(z)
        if calls == 1:
            loss = criterion(output, p, q)
        else:
            loss = criterion(output[:, :1], p) + weight * criterion(output[:, 1:], q)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Run(start, both(model(x), sines, cosines).item(), tuner)


@pytest.mark.parametrize(("name", "weight"), [("sgdm", 1.0), ("sgdm", 0.1), ("adamw", 1.0)])
def test_two_tasks_in_two_calls_end_near_one_call(name, weight):
    one, two = (two_tasks(OPTIMIZERS[name], calls, weight) for calls in (1, 2))
    story = f"{one.start:.4g} -> {one.end:.4g} in one call, {two.end:.4g} in two"
    print(story)
    assert two.end < 1.6 * one.end, story


def test_a_residual_with_a_boundary_condition_solves_the_equation():
    """u' = -2u with u(0) = 1: two terms of different kinds and weights, and the network is called twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    apo.attach(optimizer, model, criterion, total_steps=400)
    origin, one = torch.zeros(1, 1), torch.ones(1, 1)

    def residual_at(t):
        t = t.requires_grad_()
        u = model(t)
        return torch.autograd.grad(u.sum(), t, create_graph=True)[0] + 2 * u

    for _ in range(400):
        residual = residual_at(torch.rand(64, 1))
        loss = criterion(residual, torch.zeros_like(residual)) + 10 * criterion(model(origin), one)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    left = residual_at(torch.linspace(0, 1, 50)[:, None]).square().mean().item()
    print(left)
    assert left < 0.01
