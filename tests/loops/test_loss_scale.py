"""A factor inside the criterion or the network, which apo cannot see: the loop is told, and what it is told helps."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from tests.loops.loop import Run, batches, digit_batches, digits, hear, mlp
from torch import nn

import apo

#: What such a loop is told.
TOLD = (
    r"the loss seems to be multiplied by about (\S+), or less, inside the criterion or the network.* fsd_weight=(\S+)$"
)
OPTIMIZERS = {
    "SGDm": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "AdamW": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
}
of_each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def scaled_inside_the_criterion(optimizer, factor, steps=150, **options):
    def loop(lr, attach):
        model, inner = mlp(), apo.criterion(lambda output, y: factor * F.cross_entropy(output, y))
        weights = OPTIMIZERS[optimizer](model.parameters(), lr)
        tuner = attach(weights, model, inner, **options)
        for x, y in digit_batches(steps):
            weights.zero_grad()
            inner(model(x), y).backward()
            weights.step()
        x, y = digits()[:2]
        return Run(2.3, F.cross_entropy(model(x), y).item(), tuner)

    return loop


class OwnLoss(nn.Module):
    """Returns ``(outputs, factor * loss)``."""

    def __init__(self, loss, factor, *sizes):
        super().__init__()
        self.body, self.loss, self.factor = mlp(*sizes), loss, factor

    def forward(self, x, y):
        output = self.body(x)
        return output, self.factor * self.loss(output, y)


def scaled_inside_the_network(optimizer, factor, steps=150, regression=False, **options):
    def loop(lr, attach):
        inputs, labels = digits()[:2]
        targets = inputs.view(-1, 8, 8).sum(2) if regression else labels
        model = OwnLoss(F.mse_loss, factor, 64, 8) if regression else OwnLoss(F.cross_entropy, factor)
        weights = OPTIMIZERS[optimizer](model.parameters(), lr)
        tuner = attach(weights, model, **options)
        losses = []
        for x, y in batches(steps, inputs, targets):
            weights.zero_grad()
            loss = model(x, y)[1]
            loss.backward()
            weights.step()
            losses.append(loss.item() / factor)
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    return loop


def told(said):
    return [found for found in (re.search(TOLD, sentence) for sentence in said.sentences) if found]


SQUARES, KL = apo.SquaredError("mean"), apo.CategoricalKL()


@of_each_optimizer
@pytest.mark.parametrize(
    ("factor", "discrepancy"), [(1e-3, SQUARES), (1e-2, SQUARES), (1e-3, KL)], ids=["1e-3", "1e-2", "KL 1e-3"]
)
def test_a_small_factor_inside_the_criterion_is_told_once(optimizer, factor, discrepancy):
    said = hear(scaled_inside_the_criterion(optimizer, factor, 250, discrepancy=discrepancy), 1e-3)
    assert len(told(said)) == 1, said.sentences
    assert "apo.Bregman(loss)" in "".join(said.sentences)


@of_each_optimizer
def test_a_small_factor_inside_the_network_is_told_and_the_weight_it_names_helps(optimizer):
    said = hear(scaled_inside_the_network(optimizer, 1e-3, 250), 1e-3)
    (found,) = told(said)
    factor, weight = float(found[1]), float(found[2])
    assert 1e-3 <= factor <= 3e-2
    helped = hear(scaled_inside_the_network(optimizer, 1e-3, 250, fsd_weight=weight), 1e-3)
    assert helped.run.end < 0.5 < 1.0 < said.run.end


@of_each_optimizer
def test_the_loop_of_a_regression_is_told_alike(optimizer):
    said = hear(
        scaled_inside_the_network(optimizer, 1e-4, 250, regression=True, discrepancy=apo.SquaredError("mean")), 1e-3
    )
    assert len(told(said)) == 1, said.sentences


@of_each_optimizer
def test_what_it_is_told_to_do_learns_and_is_no_reason_to_speak(optimizer):
    bregman = apo.Bregman(lambda output, y: 1e-3 * F.cross_entropy(output, y))
    said = hear(scaled_inside_the_criterion(optimizer, 1e-3, 250, discrepancy=bregman), 1e-3)
    assert said.run.end < 0.1 and not said.sentences


@of_each_optimizer
@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_a_loss_of_ordinary_scale_is_no_reason_to_speak(optimizer, factor):
    assert not hear(scaled_inside_the_network(optimizer, factor, 400), 1e-3).sentences
    squares = scaled_inside_the_criterion(optimizer, factor, 400, discrepancy=apo.SquaredError("mean"))
    assert not hear(squares, 1e-3).sentences


@of_each_optimizer
def test_a_regression_of_ordinary_scale_is_no_reason_to_speak(optimizer):
    options = {"regression": True, "discrepancy": apo.SquaredError("mean")}
    assert not hear(scaled_inside_the_network(optimizer, 1.0, 400, **options), 1e-3).sentences


@of_each_optimizer
def test_a_loss_far_from_its_minimum_is_no_reason_to_speak(optimizer):
    def loop(lr, attach):  # linear in the outputs, so that all of the price is that of the function-space term
        inputs, labels = digits()[:2]
        model, criterion = mlp(64, 1), nn.L1Loss()
        weights = OPTIMIZERS[optimizer](model.parameters(), lr)
        tuner = attach(weights, model, criterion)
        for x, y in batches(450, inputs, 1e4 + labels[:, None].float()):
            weights.zero_grad()
            criterion(model(x), y).backward()
            weights.step()
        return Run(1e4, 0.0, tuner)

    assert not told(hear(loop, 1e-3))
