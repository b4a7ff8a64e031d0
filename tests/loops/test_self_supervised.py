"""Losses that compare embeddings: SimCLR, BYOL, triplets."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from tests.loops.loop import Run, assert_learns, assert_not_silently_lost, batches, digits, mlp
from torch import nn

import apo


def augmented(x):
    return x * (torch.rand_like(x) > 0.2) + 0.1 * torch.randn_like(x)


def nt_xent(one, other):
    both = F.normalize(torch.cat([one, other]), dim=1)
    similarity = both @ both.T / 0.2
    similarity = similarity.masked_fill(torch.eye(len(both), dtype=torch.bool), -1e9)
    return F.cross_entropy(similarity, torch.arange(len(both)).roll(len(one)))


def test_simclr_with_two_calls_of_the_network_ends_near_the_best_rate():
    def loop(lr, attach):
        model, criterion = mlp(64, 16), apo.criterion(nt_xent)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner, losses = attach(optimizer, model, criterion, discrepancy=apo.SquaredError()), []
        for (x,) in batches(150, digits()[0]):
            optimizer.zero_grad()
            loss = criterion(model(augmented(x)), model(augmented(x)))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    assert_learns(loop, [3e-3, 1e-2], short=0.15)


@torch.no_grad()
def neighbours_wrong(encoder):
    """Return how often the nearest of the training digits, by cosine, has another label."""
    inputs, labels, test_inputs, test_labels = digits()
    near = F.normalize(encoder(test_inputs), dim=1) @ F.normalize(encoder(inputs), dim=1).T
    return float((labels[near.argmax(1)] != test_labels).float().mean())


def byol_loop(lr, attach):
    class Byol(nn.Module):
        def __init__(self):
            super().__init__()
            self.online, self.predictor = mlp(64, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.predictor(self.online(x))

    torch.manual_seed(0)
    model = Byol()
    target = copy.deepcopy(model.online).requires_grad_(False)
    criterion = apo.criterion(lambda one, other: 2 - 2 * F.cosine_similarity(one, other).mean())
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    tuner = attach(optimizer, model, criterion, discrepancy=apo.SquaredError(), total_steps=150)
    losses = []
    for (x,) in batches(150, digits()[0]):
        one, other = augmented(x), augmented(x)
        with torch.no_grad():
            goals = target(other), target(one)
        optimizer.zero_grad()
        loss = 0.5 * (criterion(model(one), goals[0]) + criterion(model(other), goals[1]))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), model.online.parameters(), strict=True):
                slow.lerp_(fast, 0.02)
        losses.append(loss.item())
    return Run(losses[0], sum(losses[-10:]) / 10, tuner), neighbours_wrong(model.online)


def test_byol_neither_stands_still_nor_collapses():
    assert_learns(lambda lr, attach: byol_loop(lr, attach)[0], [3e-3, 1e-2], short=0.1)
    random_network = neighbours_wrong(mlp(64, 16))
    assert byol_loop(1e-6, apo.attach)[1] < random_network + 0.1, "the embedding has collapsed"


def triplet_loop(lr, attach):
    torch.manual_seed(0)
    model, criterion = mlp(64, 8), nn.TripletMarginLoss(margin=1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    tuner, losses = attach(optimizer, model, criterion, discrepancy=apo.SquaredError()), []
    inputs, labels = digits()[:2]
    by_label = torch.stack([inputs[labels == label][:50] for label in range(10)])
    for x, y in batches(150, inputs, labels):
        same = by_label[y, torch.randint(50, y.shape)]
        others = by_label[(y + torch.randint(1, 10, y.shape)) % 10, torch.randint(50, y.shape)]
        optimizer.zero_grad()
        loss = criterion(model(x), model(same), model(others))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(losses[0], sum(losses[-10:]) / 10, tuner)


def test_a_triplet_loss_on_three_calls_of_the_network_works_or_says_why_not():
    assert_not_silently_lost(triplet_loop, [3e-3, 1e-2], initial=1e-6, short=0.15, about="criterion")
