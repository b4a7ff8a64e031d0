"""A loss that rises because the data have changed, or that cannot fall far, is not a network that is lost."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from tests.loops.loop import Run, assert_learns, batches, digit_batches, digits, mlp
from torch import nn

import apo


def sgdm(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adamw(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr)


#: An optimizer, and rates of which one is good.
OPTIMIZERS = pytest.mark.parametrize("build, rates", [(sgdm, [0.03, 0.1]), (adamw, [0.003, 0.01])])


def trained(build, lr, attach, steps, make, criterion, stream, figure):
    """Train a network on a stream of batches and return how it ended by ``figure(model)``."""
    model = make()
    optimizer = build(model, lr)
    tuner = attach(optimizer, model, criterion, total_steps=steps)
    start = figure(model)
    for x, y in stream():
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return Run(start, figure(model), tuner)


def assert_learns_without_a_word(loop, rates, short):
    with warnings.catch_warnings():
        warnings.simplefilter("error", apo.ApoWarning)
        assert_learns(loop, rates, initial=1e-5, short=short)


@torch.no_grad()
def mean_loss(model):
    """Return the cross-entropy on the training digits."""
    inputs, labels, _, _ = digits()
    return float(nn.functional.cross_entropy(model(inputs), labels))


def test_tasks_that_come_one_after_the_other_are_learned_in_turn():
    inputs, labels, _, _ = digits()

    def stream():
        for part in (labels < 5, labels >= 5, labels >= 0):
            yield from batches(200, inputs[part], labels[part])

    def loop(lr, attach):
        return trained(sgdm, lr, attach, 600, mlp, nn.CrossEntropyLoss(), stream, mean_loss)

    assert_learns_without_a_word(loop, [0.03, 0.1], short=0.15)


@OPTIMIZERS
def test_targets_that_grow_twentyfold_do_not_send_the_network_back(build, rates):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1024, 8, generator=generator)
    targets = inputs[:, :4].sin().sum(1, keepdim=True)

    def stream():
        for factor in (0.5, 3.0, 10.0):
            yield from batches(200, inputs, factor * targets)

    def figure(model):
        with torch.no_grad():
            return float(nn.functional.mse_loss(model(inputs), 10 * targets))

    def loop(lr, attach):
        return trained(build, lr, attach, 600, lambda: mlp(8, 1), nn.MSELoss(), stream, figure)

    assert_learns_without_a_word(loop, [lr / 3 for lr in rates] + rates, short=0.1)


@OPTIMIZERS
def test_a_constant_in_the_loss_hides_nothing(build, rates):
    criterion = apo.criterion(lambda outputs, labels: 1000.0 + nn.functional.cross_entropy(outputs, labels))

    def loop(lr, attach):
        attach = functools.partial(attach, discrepancy=apo.CategoricalKL())
        return trained(build, lr, attach, 600, mlp, criterion, lambda: digit_batches(600), mean_loss)

    assert_learns_without_a_word(loop, rates, short=0.05)


@OPTIMIZERS
def test_a_signal_of_two_percent_is_learned(build, rates):
    def draw(size, generator):
        inputs = torch.randn(size, 8, generator=generator)
        return inputs, inputs[:, :4].sin().sum(1, keepdim=True)

    inputs, signal = draw(4096, torch.Generator().manual_seed(0))

    def stream():
        generator = torch.Generator().manual_seed(1)
        for _ in range(600):
            x, y = draw(512, generator)
            yield x, y + 10.0 * torch.randn(y.shape, generator=generator)

    def figure(model):
        with torch.no_grad():
            return float(nn.functional.mse_loss(model(inputs), signal))

    def loop(lr, attach):
        return trained(build, lr, attach, 600, lambda: mlp(8, 1), nn.MSELoss(), stream, figure)

    assert_learns_without_a_word(loop, [lr / 3 for lr in rates] + rates, short=0.2)


@OPTIMIZERS
def test_a_first_batch_that_is_easy_sets_no_mark(build, rates):
    inputs, labels, _, _ = digits()

    def stream():
        zeros = labels == 0
        yield inputs[zeros][:64], labels[zeros][:64]
        yield from digit_batches(599)

    def make():
        model = mlp()
        with torch.no_grad():
            model[-1].bias[0] = 4.0  # the first batch is right from the start
        return model

    def loop(lr, attach):
        return trained(build, lr, attach, 600, make, nn.CrossEntropyLoss(), stream, mean_loss)

    assert_learns_without_a_word(loop, rates, short=0.05)
