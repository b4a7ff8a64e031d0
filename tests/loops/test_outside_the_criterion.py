"""Training loops whose gradient does not come from the watched loss alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.loops.loop import Run, digit_batches, hear, mlp, wrong
from torch import nn

#: What a loop is told if most of its gradient comes from elsewhere.
TOLD = "not those of the loss that apo runs again"


class Autoencoder(nn.Module):
    """Classifies and reconstructs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.decoder, self.classifier = nn.Linear(32, 64), nn.Linear(32, 10)

    def forward(self, x):
        hidden = self.encoder(x)
        return self.classifier(hidden), self.decoder(hidden)


def two_losses(weight_at):
    """Return a loop in which only one of two losses is the criterion, with a weight of ``weight_at(step)``."""

    def loop(lr, attach):
        model, criterion = Autoencoder(), nn.CrossEntropyLoss()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner, start = attach(optimizer, model, criterion), wrong(lambda x: model(x)[0])
        for step, (x, y) in enumerate(digit_batches(120)):
            optimizer.zero_grad()
            logits, image = model(x)
            (weight_at(step) * criterion(logits, y) + F.mse_loss(image, x)).backward()
            optimizer.step()
        return Run(start, wrong(lambda x: model(x)[0]), tuner)

    return loop


@pytest.mark.parametrize(
    "weight_at", [lambda _: 1e-3, lambda step: 1.0 if step < 60 else 1e-3], ids=["from the start", "later"]
)
def test_a_loop_that_mostly_minimises_something_else_is_told_so(weight_at):
    said = hear(two_losses(weight_at), 1e-3)
    assert sum(TOLD in sentence for sentence in said.sentences) == 1
    assert said.run is not None


def test_a_small_penalty_outside_the_criterion_is_no_reason_to_speak():
    assert not any(TOLD in sentence for sentence in hear(two_losses(lambda _: 10.0), 1e-3).sentences)


def test_noise_that_outweighs_the_gradients_is_told():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for x, y in digit_batches(20):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad += 0.1 * torch.randn_like(parameter)
            optimizer.step()
        return Run(start, wrong(model), tuner)

    assert any(TOLD in sentence for sentence in hear(loop, 1e-3).sentences)


def test_dropout_accumulation_and_clipping_are_no_reason_to_speak():
    def loop(lr, attach):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Dropout(0.5), nn.Linear(50, 10))
        criterion = nn.CrossEntropyLoss()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for _ in range(20):
            optimizer.zero_grad()
            for x, y in digit_batches(4):
                (criterion(model(x), y) / 4).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
        return Run(start, wrong(model), tuner)

    assert not any(TOLD in sentence for sentence in hear(loop, 1e-3).sentences)


class LARS(torch.optim.Optimizer):
    """Decays and scales the gradient of each layer in place, as the LARS of pytorch_optimizer does."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(p, alpha=0.2)
                p.grad.mul_(1e-2 * p.norm() / p.grad.norm() if p.ndim > 1 else 1e-4)
                p.add_(p.grad, alpha=-group["lr"])
        return loss


def scaling_in_place(in_closure):
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = LARS(model.parameters(), lr)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for x, y in digit_batches(120):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                return loss

            if in_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return Run(start, wrong(model), tuner)

    return loop


@pytest.mark.parametrize("in_closure", [False, True])
def test_an_optimizer_that_changes_the_gradients_in_place_is_no_reason_to_speak(in_closure):
    said = hear(scaling_in_place(in_closure), 1.0)
    assert said.run is not None and said.run.end < said.run.start
    assert not any(TOLD in sentence for sentence in said.sentences)


def test_noise_in_a_closure_is_told():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        attach(optimizer, model, criterion)
        for x, y in digit_batches(20):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                for parameter in model.parameters():
                    parameter.grad += 0.1 * torch.randn_like(parameter)
                return loss

            optimizer.step(closure)
        return Run(1.0, wrong(model))

    assert any(TOLD in sentence for sentence in hear(loop, 1e-3).sentences)
