"""Custom losses: criteria with other arguments than outputs and targets, networks that return more than it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.loops.loop import Run, assert_learns, digit_batches, digits, mlp, wrong
from torch import nn

import apo

STEPS = 150


class TwoHeads(nn.Module):
    """Logits of the label and an estimate of the ink, as a detector returns classes and boxes."""

    def __init__(self, as_dict):
        super().__init__()
        self.body, self.as_dict = mlp(64, 11), as_dict

    def forward(self, x):
        logits, ink = self.body(x).split([10, 1], dim=1)
        return {"logits": logits, "ink": ink} if self.as_dict else (logits, ink)


def distill(model, x, y, criterion):
    return criterion(model(x)[0], 2.0 * F.one_hot(y, 10).float(), y)


def soft_and_hard(output, teacher, y, share=0.5):
    soft = F.kl_div(output.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
    return share * soft + (1 - share) * F.cross_entropy(output, y)


def rank(model, x, y, criterion):
    logits = model(x)[0]
    other = (y + 1 + torch.arange(len(y)) % 9) % 10
    return criterion(logits.gather(1, y[:, None]), logits.gather(1, other[:, None]))


def pairwise(positive, negative):
    return -F.logsigmoid(positive - negative).mean()


def detect(model, x, y, criterion):
    return criterion(model(x), [{"label": label, "ink": image.mean()} for label, image in zip(y, x, strict=True)])


def detection(outputs, targets):
    labels, ink = (torch.stack([target[name] for target in targets]) for name in ("label", "ink"))
    return F.cross_entropy(outputs["logits"], labels) + (outputs["ink"].squeeze(1) - ink).square().mean()


LOSSES = {"distillation": (distill, soft_and_hard), "ranking": (rank, pairwise), "detection": (detect, detection)}


@pytest.mark.parametrize("name", LOSSES)
def test_a_criterion_with_other_arguments_ends_near_the_best_rate_with_its_bregman_divergence(name):
    compute, function = LOSSES[name]

    def loop(lr, attach):
        model, criterion = TwoHeads(as_dict=name == "detection"), apo.criterion(function)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        tuner = attach(optimizer, model, criterion, total_steps=STEPS, discrepancy=apo.Bregman(function))
        losses = []
        for x, y in digit_batches(STEPS):
            optimizer.zero_grad()
            loss = compute(model, x, y, criterion)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    assert_learns(loop, [3e-3, 1e-2], initial=1e-6, short=0.06)


def test_outputs_that_are_no_tensors_are_refused_with_what_to_return():
    class Gaussian(nn.Linear):
        def forward(self, x):
            return torch.distributions.Normal(super().forward(x), 1.0)

    model, criterion = Gaussian(64, 1), apo.criterion(lambda normal, y: -normal.log_prob(y).mean())
    optimizer = torch.optim.AdamW(model.parameters())
    apo.attach(optimizer, model, criterion, discrepancy=apo.Bregman(criterion))
    criterion(model(digits()[0][:8]), torch.zeros(8, 1)).backward()
    with pytest.raises(TypeError, match="got an object of type Normal: let it return tensors"):
        optimizer.step()


class Labeller(nn.Module):
    """Returns what a user has put together: scores, the loss and its parts."""

    def __init__(self, form):
        super().__init__()
        self.body, self.form = mlp(), form

    def forward(self, x, labels):
        scores = self.body(x)
        loss = F.cross_entropy(scores, labels)
        if self.form == "mapping":
            return {"scores": scores, "loss": loss, "entropy": scores.logsumexp(-1).mean()}
        return SimpleNamespace(logits=scores, loss=loss)


@pytest.mark.parametrize("form", ["mapping", "object"])
def test_a_network_that_returns_its_loss_among_other_things_ends_near_the_best_rate(form):
    def loop(lr, attach):
        model = Labeller(form)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        tuner, start = attach(optimizer, model, total_steps=STEPS), wrong(model.body)
        for x, y in digit_batches(STEPS):
            optimizer.zero_grad()
            out = model(x, y)
            (out["loss"] if form == "mapping" else out.loss).backward()
            optimizer.step()
        return Run(start, wrong(model.body), tuner)

    assert_learns(loop, [3e-3, 1e-2], initial=1e-6, short=0.06)


def test_a_network_that_returns_numbers_alone_is_told_to_return_its_outputs():
    class Numbers(nn.Linear):
        def forward(self, x, y):
            loss = F.mse_loss(super().forward(x), y)
            return {"loss": loss, "reconstruction": loss.detach()}

    model = Numbers(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    apo.attach(optimizer, model)
    model(torch.randn(8, 4), torch.randn(8, 1))["loss"].backward()
    with pytest.raises(TypeError, match="got nothing else: let it return its outputs as well"):
        optimizer.step()
