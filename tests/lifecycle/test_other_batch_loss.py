"""The loss on the other batch counts as training counts its own: scaled, accumulated, without reduction."""

from __future__ import annotations

import pytest
import torch
from tests.lifecycle.harness import CLASSES, FEATURES, batch
from torch import nn
from torch.nn import functional as F

import apo

OTHER = batch(77)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def still(model: nn.Module) -> apo.LearningRate:
    """Returns a rule whose steps go nowhere, so that every loss is that of the weights as they are."""
    return apo.LearningRate(torch.optim.SGD(model.parameters(), lr=1e-12), warm_start=False, bounds=(1e-12, 1e-11))


def attached_run(training_step, reduction: str = "mean", share: float = 1.0) -> tuple[apo.MetaStep, float, float]:
    """Returns the record of one step, and the mean losses of its own batch and of the other one."""
    model, criterion = network(), nn.CrossEntropyLoss(reduction=reduction)
    rule = still(model)
    unscaled = torch.amp.GradScaler("cpu", enabled=False)  # says that a large weight is no loss scale
    options = {"fsd_weight": 0.0, "fsd_batch": [OTHER], "other_batch_share": share, "scaler": unscaled}
    tuner = apo.attach(rule, model, criterion, **options)
    training_step(lambda index: criterion(model(batch(index)[0]), batch(index)[1]))
    rule.optimizer.step()
    own, other = (F.cross_entropy(model(x), y).item() for x, y in (batch(0), OTHER))
    return tuner.history[-1], own, other


WAYS = {
    "plain": (lambda loss: loss(0).backward(), "mean", 1.0),
    "scaled": (lambda loss: (100 * loss(0)).backward(), "mean", 100.0),
    "accumulated mean": (lambda loss: [(loss(0) / 4).backward() for _ in range(4)], "mean", 1.0),
    "accumulated sum": (lambda loss: [loss(0).backward() for _ in range(3)], "mean", 3.0),
    "mean of elements": (lambda loss: loss(0).mean().backward(), "none", 1.0),
    "sum of elements": (lambda loss: loss(0).sum().backward(), "none", 16.0),
    "elements, accumulated": (lambda loss: [(loss(0).mean() / 2).backward() for _ in range(2)], "none", 1.0),
}


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("way", WAYS)
def test_both_batches_have_the_weight_that_training_gives_its_own(way, share):
    training_step, reduction, factor = WAYS[way]
    record, own, other = attached_run(training_step, reduction, share)
    expected = factor * ((1 - share) * own + share * other)
    assert record.look_ahead_loss == pytest.approx(expected, rel=1e-5)
    assert record.loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("weight, count, factor", [(1.0, 1, 1.0), (0.25, 4, 1.0), (7.0, 1, 7.0)])
def test_the_explicit_door_agrees(weight, count, factor):
    model = network()
    tuner = apo.APO(still(model), model, criterion=F.cross_entropy, fsd_batch=[OTHER], other_batch_share=1.0)
    for _ in range(count):
        tuner.backward(*batch(0), weight=weight)
    tuner.step()
    expected = factor * F.cross_entropy(model(OTHER[0]), OTHER[1]).item()
    assert tuner.history[-1].look_ahead_loss == pytest.approx(expected, rel=1e-5)
