"""The criteria of torch with ``discrepancy="auto"``: known, or refused with the divergence that fits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.loops.loop import (
    Run,
    assert_learns,
    assert_not_silently_lost,
    batches,
    digit_batches,
    digits,
    mlp,
    wrong,
)
from torch import nn

import apo

INPUTS, LABELS = digits()[:2]
SUMS = torch.stack([INPUTS[:, :32].mean(1), INPUTS[:, 32:].mean(1)], dim=1) * 5


def regression_loop(criterion, build, make_target, make_optimizer=torch.optim.Adam, steps=200):
    def loop(lr, attach):
        torch.manual_seed(0)
        model = build()
        optimizer = make_optimizer(model.parameters(), lr=lr)
        tuner, losses = attach(optimizer, model, criterion), []
        for x, y, label in batches(steps, INPUTS, SUMS, LABELS):
            optimizer.zero_grad()
            loss = criterion(model(x), make_target(x, y, label))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    return loop


def the_sums(x, y, label):
    return y


LOSSES = {
    "BCELoss": (
        nn.BCELoss(),
        lambda: nn.Sequential(mlp(), nn.Sigmoid()),
        lambda x, y, label: F.one_hot(label, 10).float(),
        [1e-2, 3e-2],
    ),
    "L1Loss": (nn.L1Loss(), lambda: mlp(64, 2), the_sums, [3e-3, 1e-2]),
    "SmoothL1Loss": (nn.SmoothL1Loss(), lambda: mlp(64, 2), the_sums, [3e-3, 1e-2]),
    "HuberLoss": (nn.HuberLoss(delta=0.5), lambda: mlp(64, 2), the_sums, [3e-3, 1e-2]),
    "PoissonNLLLoss": (
        nn.PoissonNLLLoss(),
        lambda: mlp(64, 2),
        lambda x, y, label: torch.stack([label, label // 2], dim=1).float(),
        [1e-2, 3e-2],
    ),
    "KLDivLoss": (
        nn.KLDivLoss(reduction="batchmean"),
        lambda: nn.Sequential(mlp(), nn.LogSoftmax(1)),
        lambda x, y, label: 0.9 * F.one_hot(label, 10) + 0.01,
        [1e-2, 3e-2],
    ),
    "MultiMarginLoss": (nn.MultiMarginLoss(), mlp, lambda x, y, label: label, [1e-2, 3e-2]),
    "NLLLoss": (
        nn.NLLLoss(),
        lambda: nn.Sequential(mlp(), nn.LogSoftmax(1)),
        lambda x, y, label: label,
        [1e-2, 3e-2],
    ),
    "MultiLabelSoftMarginLoss": (
        nn.MultiLabelSoftMarginLoss(),
        mlp,
        lambda x, y, label: F.one_hot(label, 10).float(),
        [1e-2, 3e-2],
    ),
}


#: A message that names one divergence says ``discrepancy=apo.SquaredError()``, say.
ONE_DIVERGENCE = "discrepancy=apo."


@pytest.mark.parametrize("name", LOSSES)
def test_auto_knows_the_loss_or_names_the_divergence_that_fits(name):
    criterion, build, make_target, rates = LOSSES[name]
    loop = regression_loop(criterion, build, make_target)
    assert_not_silently_lost(loop, rates, initial=1e-6, short=0.1, about=ONE_DIVERGENCE)


@pytest.mark.parametrize("criterion", [nn.L1Loss(), nn.HuberLoss()], ids=["L1Loss", "HuberLoss"])
def test_a_loss_that_grows_linearly_learns_targets_in_the_thousands(criterion):
    loop = regression_loop(criterion, lambda: mlp(64, 2), lambda x, y, label: 1000 * y, steps=300)
    assert_learns(loop, [3e-2, 1e-1, 3e-1], initial=1e-6, short=0.1)


def test_auto_knows_gaussian_nll_of_two_outputs_or_names_the_divergence_that_fits():
    class MeanAndVariance(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(64, 4)

        def forward(self, x):
            mean, raw = self.body(x).chunk(2, dim=1)
            return mean, F.softplus(raw) + 1e-3

    def loop(lr, attach):
        torch.manual_seed(0)
        model, criterion = MeanAndVariance(), nn.GaussianNLLLoss()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner, losses = attach(optimizer, model, criterion), []
        for x, y in batches(200, INPUTS, SUMS):
            optimizer.zero_grad()
            mean, variance = model(x)
            loss = criterion(mean, y, variance)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    assert_not_silently_lost(loop, [3e-3, 1e-2], initial=1e-6, short=0.15, about=ONE_DIVERGENCE)


@pytest.mark.parametrize(
    ("kind", "factor"), [("SGDm", 1e-3), ("SGDm", 1e3), ("Adam", 1e-6), ("Adam", 1e-3), ("Adam", 1e3)]
)
def test_a_loss_times_a_factor_learns_like_the_loss_itself(kind, factor):
    def loop(lr, attach, factor=factor):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        if kind == "SGDm":
            optimizer = torch.optim.SGD(model.parameters(), lr=lr / factor, momentum=0.9)
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=lr / 10)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for x, y in digit_batches(200):
            optimizer.zero_grad()
            (factor * criterion(model(x), y)).backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, [0.1, 0.3], initial=1e-5, short=0.06)


def test_a_small_factor_of_the_loss_changes_nothing_but_the_scale_of_the_rate():
    ends = []
    for factor in (1.0, 1e-3):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        rule = apo.LearningRate(optimizer, bounds=(1e-10, 1e6))
        tuner = apo.attach(rule, model, criterion)
        for x, y in digit_batches(60):
            optimizer.zero_grad()
            (factor * criterion(model(x), y)).backward()
            optimizer.step()
        ends.append((wrong(model), factor * tuner.history[-1].lr[0], tuner.history[-1].objective / factor))
    assert ends[0] == pytest.approx(ends[1], rel=0.05)


def test_a_loss_whose_sum_is_taken_is_refused_with_what_to_do():
    criterion = nn.CrossEntropyLoss(reduction="sum")
    with pytest.raises(ValueError, match=r"reduction='sum'.*discrepancy"):
        regression_loop(criterion, mlp, lambda x, y, label: label)(1e-3, apo.attach)


def test_a_loss_without_reduction_that_is_weighted_by_example_ends_near_the_best_rate():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss(reduction="none")
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        tuner, start = attach(optimizer, model, criterion, total_steps=200), wrong(model)
        for x, y in digit_batches(200):
            optimizer.zero_grad()
            (criterion(model(x), y) * torch.where(y == 3, 5.0, 1.0)).mean().backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, [3e-3, 1e-2], initial=1e-6, short=0.05)
