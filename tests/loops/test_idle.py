"""Loops that step another optimizer than the one that apo is attached to: nothing is learned, and apo says so once."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tests.loops.loop import digit_batches, mlp
from torch import nn

import apo

#: What such a loop is told.
TOLD = r"losses were back-propagated since the attached optimizer last took a step, .* attach to the optimizer that the"


def sgdm(model, lr=0.01, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, **options)


def attached(model, criterion, lr=0.01):
    optimizer = sgdm(model, lr)
    apo.attach(optimizer, model, criterion)
    return optimizer


def train(model, criterion, optimizer, steps):
    for x, y in digit_batches(steps):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error", apo.ApoWarning)
        yield


OTHERS = {
    "rebuilt": lambda optimizer, model: sgdm(model),
    "rebuilt as AdamW": lambda optimizer, model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "rebuilt and fused": lambda optimizer, model: sgdm(model, fused=True),
    "copied": lambda optimizer, model: copy.deepcopy(optimizer),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_a_loop_that_steps_another_optimizer_is_told_once(other):
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = attached(model, criterion)
    with pytest.warns(apo.ApoWarning, match=TOLD) as caught:
        train(model, criterion, other(optimizer, model), 300)
    assert len(caught) == 1


def test_an_optimizer_that_is_rebuilt_during_training_is_noticed():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    train(model, criterion, attached(model, criterion), 63)
    with pytest.warns(apo.ApoWarning, match=TOLD):
        train(model, criterion, sgdm(model), 150)


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x, y):
        output = self.body(x)
        return {"logits": output, "loss": nn.functional.cross_entropy(output, y)}


def test_a_network_that_returns_its_loss_is_watched_alike():
    model = OwnLoss()
    apo.attach(sgdm(model), model)
    other = sgdm(model)
    with pytest.warns(apo.ApoWarning, match=TOLD):
        for x, y in digit_batches(150):
            other.zero_grad()
            model(x, y)["loss"].backward()
            other.step()


def test_long_accumulation_is_no_reason_to_speak(silent):
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = attached(model, criterion)
    for _ in range(3):
        optimizer.zero_grad()
        for x, y in digit_batches(200):
            (criterion(model(x), y) / 200).backward()
        optimizer.step()


def test_a_validation_without_no_grad_is_no_reason_to_speak(silent):
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = attached(model, criterion)
    for _ in range(3):
        for x, y in digit_batches(400):
            criterion(model(x), y).item()
        train(model, criterion, optimizer, 2)


def test_back_propagation_without_steps_between_steps_is_no_reason_to_speak(silent):
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = attached(model, criterion)
    train(model, criterion, optimizer, 30)
    for x, y in digit_batches(400):  # an attack on the inputs, or the noise of the gradients
        optimizer.zero_grad()
        criterion(model(x.requires_grad_()), y).backward()
    train(model, criterion, optimizer, 30)


def test_optimizers_in_turn_are_no_reason_to_speak(silent):
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizers = [attached(model, criterion) for _ in range(2)]
    for optimizer in optimizers:
        train(model, criterion, optimizer, 300)


def test_several_optimizers_of_parts_of_one_network_are_no_reason_to_speak(silent):
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (model[0], model[2])]
    for optimizer in optimizers:
        apo.attach(optimizer, model, criterion)
    for index in range(3):  # the second one now and then
        for optimizer in optimizers[: 1 + index % 2]:
            train(model, criterion, optimizer, 150)


def test_a_critic_that_trains_more_often_than_the_generator_is_no_reason_to_speak(silent):
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 64), nn.Linear(64, 1)
    loss = nn.BCEWithLogitsLoss()
    of_generator, of_critic = sgdm(generator, 1e-3), sgdm(critic, 1e-3)
    adversary = apo.criterion(lambda fake: loss(critic(fake), torch.ones(len(fake), 1)))
    apo.attach(of_generator, generator, adversary, discrepancy=apo.SquaredError("mean"))
    for step, (x, _) in enumerate(digit_batches(600)):
        of_critic.zero_grad()
        fake = generator(torch.randn(64, 4))  # back-propagated into the generator, which stays
        (loss(critic(x), torch.ones(64, 1)) + loss(critic(fake), torch.zeros(64, 1))).backward()
        of_critic.step()
        if step % 150 == 149:
            of_generator.zero_grad()
            adversary(generator(torch.randn(64, 4))).backward()
            of_generator.step()
