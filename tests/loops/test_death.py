"""A network that does not learn is noticed: apo goes back and on at a smaller rate, or says so."""

from __future__ import annotations

import pytest
import torch
from tests.loops.loop import (
    TRAINING,
    Run,
    assert_not_silently_lost,
    digit_batches,
    hear,
    mlp,
    rate_of,
    wrong,
)
from torch import nn

import apo


def sgdm(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def deep_network():
    torch.manual_seed(0)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), *hidden, nn.Linear(64, 10))


def small_alexnet():
    torch.manual_seed(0)
    channels = [(1, 16), (16, 32), (32, 48), (48, 32), (32, 32)]
    layers = [layer for one, other in channels for layer in (nn.Conv2d(one, other, 3, padding=1), nn.ReLU())]
    layers[2:2] = [nn.MaxPool2d(2)]
    layers[5:5] = [nn.MaxPool2d(2)]
    head = [nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head)


def loop_with(build, steps, precision=torch.float32):
    def loop(lr, attach):
        model, criterion = build(), nn.CrossEntropyLoss()
        optimizer = sgdm(model.parameters(), lr)
        tuner, losses = attach(optimizer, model, criterion), []
        for x, y in digit_batches(steps, size=128):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is torch.bfloat16):
                loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    return loop


def test_a_rate_that_climbs_while_the_loss_of_a_deep_network_stays_is_said_so():
    assert_not_silently_lost(loop_with(deep_network, 250), [0.1], initial=1e-3, short=0.3, about=TRAINING)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_rate_that_climbs_while_the_loss_of_a_convolutional_network_stays_is_said_so(precision):
    said = hear(loop_with(small_alexnet, 250, precision), 1e-3)
    learned = said.run is not None and said.run.end < said.run.start - 0.5
    story = said.run and f"{said.run.start:.4g} -> {said.run.end:.4g} at {rate_of(said.run):.2g}"
    assert learned or any("rate" in sentence for sentence in said.sentences), f"silently lost: {story}"


@pytest.mark.parametrize("initial", [1e-3, 1.0])
def test_gradients_that_are_all_zero_are_said_so(initial):
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        nn.init.constant_(model[0].bias, -1e3)
        model[2].requires_grad_(False)
        optimizer = sgdm(model[0].parameters(), lr)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for x, y in digit_batches(100):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    sentences = hear(loop, initial).sentences
    assert any("gradient" in sentence and "zero" in sentence for sentence in sentences), sentences


@pytest.mark.parametrize("initial", [1.0, 10.0, 100.0])
def test_a_network_that_its_first_steps_have_killed_comes_back_or_is_said_so(initial):
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = sgdm(model.parameters(), lr)
        rule = apo.LearningRate(optimizer, warm_start=False) if attach is apo.attach else optimizer
        tuner, start = attach(rule, model, criterion), wrong(model)
        for x, y in digit_batches(150):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    assert_not_silently_lost(loop, [0.03, 0.1], initial, short=0.1, about=TRAINING)
