"""A tuner that is abandoned without `detach()` goes with its optimizer, and leaves nothing on the network."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import apo


class OwnLoss(nn.Module):
    """Returns its loss beside its output, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"logits": logits, "loss": logits.square().mean()}


def attached(model: nn.Module, criterion: nn.Module | None, steps: int) -> tuple[weakref.ref, weakref.ref, weakref.ref]:
    """Trains, begins another iteration and drops everything but the network and the criterion."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuner = apo.attach(optimizer, model, criterion, interval=1, fsd_weight=0.0)
    for _ in range(steps + 1):
        optimizer.zero_grad()
        batch = torch.randn(8, 4)
        output = model(batch)
        loss = output["loss"] if criterion is None else criterion(output, torch.zeros(8, 3))
        if tuner.steps < steps:
            loss.backward()
            optimizer.step()
    return weakref.ref(tuner), weakref.ref(optimizer), weakref.ref(batch)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("own_loss", [False, True])
def test_a_dropped_optimizer_takes_tuner_and_recordings_along_while_the_network_lives_on(own_loss, steps):
    model, criterion = (OwnLoss(), None) if own_loss else (nn.Linear(4, 3), nn.MSELoss())
    gone = attached(model, criterion, steps)
    gc.collect()
    assert [reference() for reference in gone] == [None, None, None]
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert criterion is None or not criterion._forward_hooks
    model(torch.randn(8, 4))


def test_a_tuner_that_nobody_names_lives_as_long_as_its_optimizer():
    model, criterion = nn.Linear(4, 3), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    seen: list[int] = []
    apo.attach(optimizer, model, criterion, interval=1, on_meta_step=lambda record: seen.append(record.step))
    gc.collect()
    for _ in range(3):
        optimizer.zero_grad()
        criterion(model(torch.randn(8, 4)), torch.zeros(8, 3)).backward()
        optimizer.step()
    assert seen == [0, 1, 2]


def test_dropping_network_and_optimizer_frees_both():
    model, criterion = nn.Linear(4, 3), nn.MSELoss()
    gone = [weakref.ref(model), *attached(model, criterion, 2)]
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
