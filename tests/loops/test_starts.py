"""Where training starts: the warm start finds the first turning point, or says that it has found none."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from tests.loops.loop import (
    TRAINING,
    Run,
    assert_learns,
    assert_not_silently_lost,
    batches,
    best_fixed,
    digit_batches,
    digits,
    hear,
    mlp,
    wrong,
)
from torch import nn

import apo

INITIAL = [1e-8, 1e-3, 1e3]


def sgdm(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def adam(parameters, lr):
    return torch.optim.Adam(parameters, lr=lr)


class CosineClassifier(nn.Module):
    """Logits are cosines times a scale: a step that is far too long costs no more than one that is too long."""

    def __init__(self, scale, body=None):
        super().__init__()
        self.scale, self.body = scale, body or nn.Identity()
        self.classes = nn.Parameter(torch.randn(10, 64 if body is None else 50))

    def forward(self, x):
        return self.scale * F.normalize(self.body(x), dim=1) @ F.normalize(self.classes, dim=1).T


def cosine_head():
    return CosineClassifier(16, nn.Sequential(nn.Linear(64, 50), nn.ReLU()))


def digit_loop(build, criterion, make_optimizer, target=lambda y: y, in_order=False):
    """Return a loop on the digits with a network, a criterion and an optimizer of one's choice."""

    def loop(lr, attach, steps=150):
        torch.manual_seed(0)
        model = build()
        optimizer = make_optimizer(model.parameters(), lr)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        first = zip(*(part.split(64) for part in digits()[:2]), strict=True)
        for x, y in itertools.islice(itertools.cycle(first), steps) if in_order else digit_batches(steps):
            optimizer.zero_grad()
            criterion(model(x), target(y)).backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    return loop


def discriminator_loop(build, make_optimizer):
    """Return a loop that tells digits from noise, as a GAN's discriminator is trained."""

    def loop(lr, attach, steps=150):
        torch.manual_seed(0)
        model, criterion = build(), nn.BCEWithLogitsLoss()
        optimizer = make_optimizer(model.parameters(), lr)
        tuner, losses = attach(optimizer, model, criterion), []
        for (digit,) in batches(steps, digits()[0]):
            x = torch.cat([digit, torch.rand_like(digit)])
            optimizer.zero_grad()
            loss = criterion(model(x), torch.cat([torch.ones(64, 1), torch.zeros(64, 1)]))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / len(losses[-10:]), tuner)

    return loop


def softmax_network():
    return nn.Sequential(mlp(), nn.Softmax(1))


def normalised_network():
    return nn.Sequential(mlp(), nn.BatchNorm1d(10))


def normalised_discriminator():
    return nn.Sequential(mlp(64, 1), nn.BatchNorm1d(1, affine=False))


def one_hot(y):
    return F.one_hot(y, 10).float()


CROSS_ENTROPY = nn.CrossEntropyLoss()
#: A loop, and fixed rates that are good for it.
LOOPS = {
    "plain, SGDm": (digit_loop(mlp, CROSS_ENTROPY, sgdm), [0.1, 0.3]),
    "plain, Adam": (digit_loop(mlp, CROSS_ENTROPY, adam), [3e-3, 1e-2]),
    "cosine classifier, SGDm": (digit_loop(lambda: CosineClassifier(1), CROSS_ENTROPY, sgdm), [3.0, 10.0]),
    "cosine classifier, Adam": (digit_loop(lambda: CosineClassifier(1), CROSS_ENTROPY, adam), [0.03, 0.1]),
    "cosine classifier, first digits": (
        digit_loop(lambda: CosineClassifier(1), CROSS_ENTROPY, sgdm, in_order=True),
        [3.0, 10.0],
    ),
    "cosine head, SGDm": (digit_loop(cosine_head, CROSS_ENTROPY, sgdm), [0.1, 0.3]),
    "cosine head, Adam": (digit_loop(cosine_head, CROSS_ENTROPY, adam), [3e-3, 1e-2]),
    "BatchNorm on the output, SGDm": (digit_loop(normalised_network, CROSS_ENTROPY, sgdm), [0.03, 0.1]),
    "BatchNorm on the output, Adam": (digit_loop(normalised_network, CROSS_ENTROPY, adam), [3e-3, 1e-2]),
    "softmax and MSE, SGDm": (digit_loop(softmax_network, nn.MSELoss(), sgdm, one_hot), [1.0, 3.0]),
    "softmax and MSE, Adam": (digit_loop(softmax_network, nn.MSELoss(), adam, one_hot), [3e-3, 1e-2]),
    "discriminator, SGDm": (discriminator_loop(lambda: mlp(64, 1), sgdm), [0.1, 0.3]),
    "discriminator, Adam": (discriminator_loop(lambda: mlp(64, 1), adam), [1e-2, 3e-2]),
    "discriminator with BatchNorm on the output": (discriminator_loop(normalised_discriminator, adam), [1e-2, 3e-2]),
}


@pytest.mark.parametrize("name", LOOPS)
def test_training_starts_at_the_same_rate_from_every_initial_rate_or_says_that_nothing_turned(name):
    loop, _ = LOOPS[name]
    said = [hear(lambda lr, attach: loop(lr, attach, steps=2), initial) for initial in INITIAL]
    if all(one.sentences for one in said):
        return
    starts = [one.run.tuner.history[0].lr[0] for one in said]
    assert starts == pytest.approx([starts[0]] * len(starts), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(itertools.product(LOOPS, INITIAL)), ids=str)
def test_training_ends_near_the_best_rate_from_every_initial_rate_or_says_why_not(case):
    (loop, rates), initial = LOOPS[case[0]], case[1]
    assert_not_silently_lost(loop, rates, initial, short=0.15, about=TRAINING)


@pytest.mark.parametrize("initial", INITIAL)
def test_a_loss_that_raises_outside_its_range_counts_as_too_large_a_rate(initial):
    """Probabilities come from a linear network, which leaves [0, 1] if a step is too long."""
    inputs = digits()[0] - digits()[0].mean(0)
    chances = 0.5 + 0.05 * inputs[:, 20:21] - 0.05 * inputs[:, 43:44]

    def loop(lr, attach):
        torch.manual_seed(0)
        model, criterion = nn.Linear(64, 1), apo.criterion(F.binary_cross_entropy)
        nn.init.zeros_(model.weight)
        nn.init.constant_(model.bias, 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        tuner = attach(optimizer, model, criterion, discrepancy=apo.SquaredError())
        for x, chance in batches(150, inputs, chances):
            optimizer.zero_grad()
            criterion(model(x), chance).backward()
            optimizer.step()
        with torch.no_grad():
            end = F.mse_loss(model(inputs), chances)
        return Run(float((chances - 0.5).square().mean()), float(end), tuner)

    best = best_fixed(loop, [0.01, 0.03])
    run = loop(initial, apo.attach)
    assert run.end <= best.end + 0.2 * (best.start - best.end), f"{run.end:.3g} against {best.end:.3g}"


def test_an_objective_that_never_turns_is_said_so():
    """A loss that is linear in the weights, and no function-space term: the larger the rate the better."""

    def loop(lr, attach):
        torch.manual_seed(0)
        model = nn.Linear(64, 10)
        criterion = apo.criterion(lambda output, y: -output.gather(1, y[:, None]).mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        tuner = attach(optimizer, model, criterion, discrepancy=apo.SquaredError(), fsd_weight=0.0)
        for x, y in digit_batches(5):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return Run(0.0, 0.0, tuner)

    sentences = hear(loop, 1e-3).sentences
    assert any("turn" in sentence or "warm start" in sentence for sentence in sentences), sentences


@pytest.mark.parametrize("initial", INITIAL)
@pytest.mark.parametrize("name", ["plain, SGDm", "plain, Adam"])
def test_a_plain_network_ends_near_the_best_rate_from_every_initial_rate(name, initial):
    loop, rates = LOOPS[name]
    assert_learns(loop, rates, initial, short=0.05, may_be_good=True)
