"""What a loop does to the network's output before the criterion sees it.

It is repeated where that is possible; else the message says the easy way, which is to move it into the criterion.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.loops.loop import Run, assert_learns, batches, digits, mlp
from torch import nn

import apo

INPUTS, LABELS = digits()[:2]
ROWS = INPUTS.view(-1, 8, 8)


class Tagger(nn.Module):
    """Labels for each of the eight rows of a digit, (batch, row, label)."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, rows):
        return self.head(self.rnn(rows)[0])


def brightness(rows):
    return (rows.mean(-1) * 9.99).long()


def loop_of(build, loss_of, criterion, steps=100, **options):
    """Return a loop in which ``loss_of(criterion, output, x, y)`` has something between network and criterion."""

    def loop(lr, attach):
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner, losses = attach(optimizer, model, criterion, **options), []
        for x, y in batches(steps, ROWS, LABELS):
            optimizer.zero_grad()
            loss = loss_of(criterion, model(x), x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    return loop


def flat(outputs=10):
    return nn.Sequential(nn.Flatten(), mlp(64, outputs))


class Cast(nn.Module):
    def forward(self, x):
        return x.bfloat16()


def in_bfloat16():
    return nn.Sequential(Cast(), flat().bfloat16())


def chunked(criterion, output, x, y):
    one, other = output.chunk(2, dim=1)
    return criterion(one, y) + criterion(other, y)


def two_parts(criterion, output, x, y):
    return criterion(output[:, :10], y) + criterion(output[:, 10:], y % 3)


CROSS_ENTROPY = nn.CrossEntropyLoss()
BETWEEN = {
    "transpose": (Tagger, lambda c, o, x, y: c(o.transpose(1, 2), brightness(x)), CROSS_ENTROPY),
    "last position": (Tagger, lambda c, o, x, y: c(o[:, -1], y), CROSS_ENTROPY),
    "slice of a sequence": (
        Tagger,
        lambda c, o, x, y: c(o[:, :-1].reshape(-1, 10), brightness(x)[:, 1:].reshape(-1)),
        CROSS_ENTROPY,
    ),
    "boolean mask": (
        Tagger,
        lambda c, o, x, y: c(o[x.mean(-1) > 0.2], brightness(x)[x.mean(-1) > 0.2]),
        CROSS_ENTROPY,
    ),
    "temperature": (flat, lambda c, o, x, y: c(o / 0.5, y), CROSS_ENTROPY),
    "normalize": (flat, lambda c, o, x, y: c(10 * F.normalize(o, dim=1), y), CROSS_ENTROPY),
    "chunk": (lambda: flat(20), chunked, CROSS_ENTROPY),
    "two slices": (lambda: flat(13), two_parts, CROSS_ENTROPY),
    "cast to float64": (flat, lambda c, o, x, y: c(o.double(), y), CROSS_ENTROPY),
    "cast from bfloat16": (in_bfloat16, lambda c, o, x, y: c(o.float(), y), CROSS_ENTROPY),
    "squeeze": (lambda: flat(1), lambda c, o, x, y: c(o.squeeze(1), y / 9), nn.MSELoss()),
    "view": (Tagger, lambda c, o, x, y: c(o.view(-1, 10), brightness(x).view(-1)), CROSS_ENTROPY),
    "log_softmax": (flat, lambda c, o, x, y: c(F.log_softmax(o, dim=1), y), nn.NLLLoss()),
    "sigmoid": (
        flat,
        lambda c, o, x, y: c(torch.sigmoid(o), F.one_hot(y, 10).float()),
        apo.criterion(F.binary_cross_entropy),
    ),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_stands_between_network_and_criterion_works(name):
    options = {"discrepancy": apo.BernoulliKL(reduction="mean")} if name == "sigmoid" else {}
    loop = loop_of(*BETWEEN[name], **options)
    assert_learns(loop, [3e-3, 1e-2], initial=1e-6, short=0.2)
