"""Noise limits the over-relaxation where it holds the loss up, and only there."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import apo
from apo.rules.base import Comparison, Outcome
from apo.rules.over_relaxation import NoiseLimit, OverRelaxation


def follow(losses, promise=0.1, signal=0.2, every=10, curvature=0.3, is_worse=lambda: True):
    """Return the limit after losses so many steps apart."""
    limit = NoiseLimit()
    return [limit.observe(every * n, loss, promise, curvature, signal, is_worse) for n, loss in enumerate(losses)][-1]


@pytest.mark.parametrize(("curvature", "counts"), [(0.1, 0.5), (0.75, 1.0)])
@pytest.mark.parametrize("every", [1, 10, 40])
def test_the_gain_is_what_the_loss_falls_by_while_the_number_of_steps_doubles(every, curvature, counts):
    """A loss of -slope * log(t) falls by slope * log(2), wherever the meta-steps are."""
    slope, promise = 0.2, 0.4
    losses = [5.0 - slope * math.log(1 + every * k) for k in range(4000 // every)]
    limit = follow(losses, promise, every=every, curvature=curvature)
    assert limit == pytest.approx(slope * math.log(2) / (0.25 * counts * 0.8 * promise), rel=0.1)


@pytest.mark.parametrize("losses", [[2.0] * 100, [2.0 + 0.01 * k for k in range(100)]])
def test_a_loss_that_rests_or_rises_has_nothing_to_pay_noise_with(losses):
    assert follow(losses, signal=0.0) == pytest.approx(0.1)
    assert follow(losses, signal=0.0, is_worse=lambda: False) == pytest.approx(0.7)  # a plateau, or other data
    assert follow(losses, signal=0.0, is_worse=None) == pytest.approx(0.7)  # nobody knows
    assert follow(losses, signal=1.0) == math.inf  # all is signal


def test_the_first_steps_have_no_limit():
    assert follow([2.0] * 30, every=1) == math.inf > follow([2.0] * 31, every=1)
    assert follow([2.0] * 9, every=100) == math.inf > follow([2.0] * 10, every=100)


def test_the_unit_of_the_loss_does_not_matter():
    losses = [2.0 / (1 + 0.01 * k) for k in range(60)]
    one = follow(losses, 1.0)
    assert 1.4 < one < 100
    assert follow([1e-3 * x for x in losses], 1e-3) == pytest.approx(one)


def test_where_nobody_knows_any_more_whether_weights_are_worse_a_small_limit_stays():
    limit = NoiseLimit()
    for step in range(0, 2000, 10):
        known = limit.observe(step, 2.0, 0.1, 0.3, 0.0, lambda: True)
    assert limit.observe(2000, 2.0, 0.1, 0.3, 0.0, None) == pytest.approx(known) == pytest.approx(0.1)


def test_a_saved_sigma_continues():
    comparison = Comparison(0.1, 0.1, 0.03, 0.08, 0.0)
    outcomes = [Outcome(10 * k, 2.0 - 0.02 * k, 1.9, comparison=comparison) for k in range(40)]
    whole, first, second = OverRelaxation(0.9), OverRelaxation(0.9), OverRelaxation(0.9)
    for index, outcome in enumerate(outcomes):
        whole.observe(outcome)
        (first if index < 20 else second).observe(outcome)
        if index == 19:
            second.load_state_dict(first.state_dict())
    assert second.value == whole.value != first.value


def learned(optimizer, model, steps):
    tuner = apo.APO(optimizer, model, F.mse_loss, total_steps=steps)
    return lambda _, x, y: tuner.step(x, y)


def cosine(optimizer, model, steps):
    highest = optimizer.param_groups[0]["lr"]

    def step(k, x, y):
        optimizer.param_groups[0]["lr"] = highest * 0.5 * (1 + math.cos(math.pi * k / steps))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def risk(rate, way, steps=1500, seeds=(0, 1)):
    """Train on targets that are mostly noise; return the mean distance to what they are without it."""
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        teacher = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)).requires_grad_(False)
        step = way(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), model, steps)
        for k in range(steps):
            x = torch.randn(32, 6)
            step(k, x, 3 * teacher(x) + torch.randn(32, 1))
        x = torch.randn(4000, 6)
        found.append(F.mse_loss(model(x), 3 * teacher(x)).item())
    return sum(found) / len(found)


def test_on_noisy_targets_the_limit_ends_near_the_best_cosine_and_far_below_a_rule_without_it(monkeypatch):
    limited = risk(1e-3, learned)
    assert limited < 1.4 * min(risk(rate, cosine) for rate in (0.003, 0.01, 0.03))
    for limit in ("_LEAST", "_CAUTIOUS"):
        monkeypatch.setattr(f"apo.rules.over_relaxation.{limit}", 16.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", apo.ApoWarning)  # its rate is too high, and it says so
        assert limited < 0.75 * risk(1e-3, learned)
