"""Training loops in which layers begin to move after others."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from tests.loops.loop import Run, assert_learns, digit_batches, digits
from torch import nn

import apo


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@torch.no_grad()
def held_out_loss(model):
    _, _, inputs, labels = digits()
    return float(F.cross_entropy(model(inputs), labels))


@pytest.mark.parametrize("way", ["by requires_grad", "by a new group"])
@pytest.mark.parametrize(
    "build, rates",
    [(torch.optim.AdamW, [3e-3, 1e-2]), (functools.partial(torch.optim.SGD, momentum=0.9), [0.03, 0.1])],
    ids=["AdamW", "SGDm"],
)
def test_layers_that_are_unfrozen_late_are_not_destroyed(build, rates, way):
    def loop(lr, attach):
        model, criterion = network(), nn.CrossEntropyLoss()
        body = model[:4].requires_grad_(False)
        moving = model[4].parameters() if way == "by a new group" else model.parameters()
        optimizer = build(moving, lr=lr)
        tuner, start = attach(optimizer, model, criterion), held_out_loss(model)
        for step, (x, y) in enumerate(digit_batches(2600)):
            if step == 2105:  # no meta-step; no earlier weights are kept any more
                body.requires_grad_(True)
                if way == "by a new group":
                    optimizer.add_param_group({"params": body.parameters()})
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        if tuner is not None:
            assert 2105 in [record.step for record in tuner.history]
        return Run(start, held_out_loss(model), tuner)

    best = [loop(rate, lambda *_: None) for rate in rates]
    run = loop(1e-3, apo.attach)
    mark = min(each.end for each in best)
    story = f"{run.start:.3g} -> {run.end:.3g}, best fixed {mark:.3g}"
    assert run.end <= mark + 0.05 * (run.start - mark), story


def test_layers_that_are_frozen_and_unfrozen_in_turns_are_looked_at_once():
    def loop(lr, attach):
        model, criterion = network(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        tuner, start = attach(optimizer, model, criterion), held_out_loss(model)
        for step, (x, y) in enumerate(digit_batches(300)):
            model[:4].requires_grad_(step % 2 == 0)
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return Run(start, held_out_loss(model), tuner)

    run = assert_learns(loop, [0.03, 0.1], short=0.05)
    plain = network()
    fresh = apo.attach(torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), plain, nn.CrossEntropyLoss())
    due = [step for step in range(300) if fresh.is_meta_step(step)]
    early = {record.step for record in run.tuner.history if record.step > 100}
    assert early <= set(due), "a layer that has moved before made a meta-step of its own"
