"""Language models: nanoGPT's loop with its hand-written schedule, tied weights, LoRA on a frozen network."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.loops.loop import Run, assert_learns, digit_batches, mlp, wrong
from torch import nn

import apo

TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 12
LETTERS = sorted(set(TEXT))
TOKENS = torch.tensor([LETTERS.index(letter) for letter in TEXT])
BLOCK, STEPS = 16, 120


class Gpt(nn.Module):
    """nanoGPT in small: ``model(idx, targets)`` returns ``(logits, loss)``, and embedding and head share weights."""

    def __init__(self, width=32, tied=True):
        super().__init__()
        self.embed, self.place = nn.Embedding(len(LETTERS), width), nn.Embedding(BLOCK, width)
        self.attend, self.norm = nn.MultiheadAttention(width, 2, batch_first=True), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.last_norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS), bias=False)
        for weight in (p for p in self.parameters() if p.dim() >= 2):
            nn.init.normal_(weight, std=0.02)
        if tied:
            self.embed.weight = self.head.weight

    def forward(self, idx, targets=None):
        x = self.embed(idx) + self.place.weight
        mask = torch.full((BLOCK, BLOCK), -math.inf).triu(1)
        normed = self.norm(x)
        x = x + self.attend(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        logits = self.head(self.last_norm(x + self.mlp(x)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def text_batches(steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(TOKENS) - BLOCK - 1, (16,), generator=generator)
        x = torch.stack([TOKENS[start : start + BLOCK] for start in starts])
        yield x, torch.stack([TOKENS[start + 1 : start + BLOCK + 1] for start in starts])


def nanogpt_loop(lr, attach, by_hand=True):
    def get_lr(it):
        if it < 10:
            return lr * (it + 1) / 11
        return 0.1 * lr + 0.45 * lr * (1 + math.cos(math.pi * (it - 10) / (STEPS - 10)))

    torch.manual_seed(0)
    model = Gpt()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99))
    tuner, losses = attach(optimizer, model), []
    for it, (x, y) in enumerate(text_batches()):
        if by_hand:
            for group in optimizer.param_groups:
                group["lr"] = get_lr(it)
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return Run(losses[0], sum(losses[-10:]) / 10, tuner)


def test_a_network_that_returns_logits_and_loss_trains_unchanged():
    assert_learns(lambda lr, attach: nanogpt_loop(lr, attach, by_hand=False), [3e-3, 1e-2], short=0.25)


def test_nanogpt_with_its_hand_written_schedule_learns_and_says_how_the_schedule_was_read():
    with pytest.warns(apo.ApoWarning, match=r"initial (rate|lr)") as caught:
        assert_learns(nanogpt_loop, [3e-3, 1e-2], short=0.4)
    assert len([warning for warning in caught if issubclass(warning.category, apo.ApoWarning)]) == 1


def written_rate_loop(lr, attach):
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    tuner, start = attach(optimizer, model, criterion), wrong(model)
    for step, (x, y) in enumerate(digit_batches(200)):
        rate = lr * 0.5 * (1 + math.cos(math.pi * step / 200))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return Run(start, wrong(model), tuner)


def test_a_rate_written_by_hand_in_every_iteration_is_read_as_a_multiple_of_the_initial_one():
    with pytest.warns(apo.ApoWarning, match=r"initial (rate|lr)") as caught:
        assert_learns(written_rate_loop, [0.1, 0.3], initial=1e-5, short=0.05)
    assert len([warning for warning in caught if issubclass(warning.category, apo.ApoWarning)]) == 1


@pytest.mark.slow
def test_tied_weights_end_near_the_best_rate():
    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.gpt = Gpt()

        def forward(self, idx):
            return self.gpt(idx)[0]

    def loop(lr, attach):
        torch.manual_seed(0)
        model, criterion = Logits(), nn.CrossEntropyLoss()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        tuner, losses = attach(optimizer, model, criterion), []
        for x, y in text_batches():
            optimizer.zero_grad()
            loss = criterion(model(x).view(-1, len(LETTERS)), y.view(-1))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    assert_learns(loop, [3e-3, 1e-2], short=0.25)


class LowRank(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices beside it."""

    def __init__(self, frozen, rank=4):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x):
        return self.frozen(x) + x @ self.down.T @ self.up.T


def test_lora_on_a_frozen_network_ends_near_the_best_rate():
    base = mlp(hidden=64)
    trainer = torch.optim.Adam(base.parameters(), lr=3e-3)
    for x, y in digit_batches(100):
        trainer.zero_grad()
        F.cross_entropy(base(x), y).backward()
        trainer.step()
    weights = {name: value.clone() for name, value in base.state_dict().items()}

    def loop(lr, attach):
        model = mlp(hidden=64)
        model.load_state_dict(weights)
        torch.manual_seed(0)
        model[0], model[2] = LowRank(model[0]), LowRank(model[2])
        criterion = nn.CrossEntropyLoss()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
        tuner, losses = attach(optimizer, model, criterion), []
        for x, y in digit_batches(150):
            optimizer.zero_grad()
            loss = criterion(model(x.flip(1)), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert torch.equal(model[0].frozen.weight, weights["0.weight"])
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    assert_learns(loop, [1e-3, 1e-2, 3e-2], short=0.15)
