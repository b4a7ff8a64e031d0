"""Networks that return something else than tensors, tuples and mappings, as their authors write them."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from tests.loops.loop import Run, assert_learns, digit_batches, wrong
from torch import Tensor, nn


@dataclasses.dataclass
class Fields:
    logits: Tensor
    hidden: tuple[Tensor, ...]


@dataclasses.dataclass(slots=True)
class Slots:
    logits: Tensor
    hidden: tuple[Tensor, ...]


class Plain:
    def __init__(self, logits, hidden):
        self.logits, self.hidden = logits, hidden


@pytest.mark.parametrize("kind", [Fields, Slots, Plain, types.SimpleNamespace])
def test_an_output_in_an_attribute_ends_near_the_best_rate(kind):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(64, 50), nn.Linear(50, 10)

        def forward(self, x):
            hidden = self.body(x).relu()
            return kind(logits=self.head(hidden), hidden=(hidden,))

    def loop(lr, attach):
        model, criterion = Network(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        tuner, start = attach(optimizer, model, criterion), wrong(lambda x: model(x).logits)
        for x, y in digit_batches(200):
            optimizer.zero_grad()
            criterion(model(x).logits, y).backward()
            optimizer.step()
        return Run(start, wrong(lambda x: model(x).logits), tuner)

    assert_learns(loop, [0.1, 0.3], short=0.03)
