"""Training loops that differentiate on the way to the loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.loops.loop import Run, assert_learns
from torch import nn
from torch.func import functional_call

import apo

RATES = [3e-3, 1e-2]


def network(inputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 1))


class Forces(nn.Module):
    """The negative gradient of an energy."""

    def __init__(self):
        super().__init__()
        self.energy = network()

    def forward(self, x):
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def positions(count):
    """Yield positions and the forces of a spring."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(64, 2, generator=generator)
        yield x, -x


def mean_loss(losses):
    return torch.stack(losses[-10:]).mean().item()


def test_a_network_that_differentiates_in_its_forward_pass_ends_near_the_best_rate():
    def loop(lr, attach):
        model, criterion, losses = Forces(), nn.MSELoss(), []
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner = attach(optimizer, model, criterion, total_steps=200)
        for x, forces in positions(200):
            optimizer.zero_grad()
            losses.append(criterion(model(x), forces))
            losses[-1].backward()
            optimizer.step()
        return Run(losses[0].item(), mean_loss(losses), tuner)

    assert_learns(loop, RATES, short=0.03)


def test_a_loop_that_differentiates_the_output_by_the_input_ends_near_the_best_rate():
    def loop(lr, attach):
        model, criterion, losses = network(), nn.MSELoss(), []
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner = attach(optimizer, model, criterion, total_steps=200)
        for x, forces in positions(200):
            x.requires_grad_()
            optimizer.zero_grad()
            gradient = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
            losses.append(criterion(-gradient, forces))
            losses[-1].backward()
            optimizer.step()
        return Run(losses[0].item(), mean_loss(losses), tuner)

    assert_learns(loop, RATES, short=0.03)


def adapted(model, x, y):
    """Return the weights after a step of an inner loop."""
    own = dict(model.named_parameters())
    loss = F.mse_loss(functional_call(model, own, (x,)), y)
    gradients = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    return {name: p - 0.05 * g for (name, p), g in zip(own.items(), gradients, strict=True)}


class Learner(nn.Module):
    """An inner loop and a pass with what it has learned."""

    def __init__(self):
        super().__init__()
        self.network = network(1)

    def forward(self, x, y, query):
        return functional_call(self.network, adapted(self.network, x, y), (query,))


def tasks(count):
    """Yield two halves of the points of a sine with another phase each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.rand(40, 1, generator=generator) * 6 - 3
        y = torch.sin(x + 0.5 * torch.rand(1, generator=generator))
        yield x[:20], y[:20], x[20:], y[20:]


def test_an_inner_loop_in_the_forward_pass_ends_near_the_best_rate():
    def loop(lr, attach):
        model, criterion, losses = Learner(), nn.MSELoss(), []
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner = attach(optimizer, model, criterion, total_steps=200)
        for x, y, query, answer in tasks(200):
            optimizer.zero_grad()
            losses.append(criterion(model(x, y, query), answer))
            losses[-1].backward()
            optimizer.step()
        return Run(losses[0].item(), mean_loss(losses), tuner)

    assert_learns(loop, RATES, short=0.05)


@pytest.mark.parametrize("first_order", [False, True])
def test_an_inner_loop_outside_of_the_network_is_refused_with_what_to_do(first_order):
    model, criterion = network(1), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters())
    apo.attach(optimizer, model, criterion)
    x, y, query, answer = next(tasks(1))
    weights = adapted(model, x, y)
    if first_order:
        weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    loss = criterion(functional_call(model, weights, (query,)), answer)
    gradients = torch.autograd.grad(loss, list((weights if first_order else dict(model.named_parameters())).values()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    with pytest.raises(apo.ReplayError, match=r"functional_call.*module.*forward"):
        optimizer.step()
