"""Padding must not count: a padded batch gives the look-ahead of the unpadded one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apo

TOKENS, LENGTH, PADDED = 7, 4, 6


class Tagger(nn.Module):
    """Tags every token by itself, so that padding cannot reach the others; it may compute its own loss."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.flat = flat
        self.embed, self.head = nn.Embedding(TOKENS, 5), nn.Linear(5, TOKENS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits = self.head(self.embed(input_ids).tanh())
        if labels is None:
            return logits.reshape(-1, TOKENS) if self.flat else logits.transpose(1, 2).contiguous()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def sentences(index: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(TOKENS, (5, LENGTH + 1), generator=torch.Generator().manual_seed(index))
    return text[:, :-1], text[:, 1:]


def padded(tokens: Tensor, value: int) -> Tensor:
    return F.pad(tokens, (0, PADDED - LENGTH), value=value)


def train(step: Callable[[apo.Attached, nn.Module, int], Tensor], flat: bool, criterion: Any, **options: Any):
    torch.manual_seed(0)
    model = Tagger(flat).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tuner = apo.attach(optimizer, model, criterion, interval=2, **options)
    for index in range(7):
        optimizer.zero_grad()
        step(tuner, model, index).backward()
        optimizer.step()
    return tuner


def assert_same(left: apo.Attached, right: apo.Attached) -> None:
    assert left.history.column("fsd") == pytest.approx(right.history.column("fsd"), rel=1e-5)
    assert left.history.column("lr/0") == pytest.approx(right.history.column("lr/0"), rel=1e-9)
    assert left.history[-1].fsd > 0


@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("fsd_batch", ["previous", "same"])
@pytest.mark.parametrize("flat", [True, False])
def test_positions_with_the_criterions_ignore_index_do_not_count(flat, fsd_batch, ignore_index):
    def shaped(target: Tensor) -> Tensor:
        return target.flatten() if flat else target

    def step(pad: bool, criterion: nn.Module):
        def one(tuner: apo.Attached, model: nn.Module, index: int) -> Tensor:
            tokens, target = sentences(index)
            target = target.clamp(max=2)  # so that no true label is the ignored one
            if pad:
                tokens, target = padded(tokens, 0), padded(target, ignore_index)
            return criterion(model(tokens), shaped(target))

        return one

    tuners = []
    for pad in (True, False):
        criterion = nn.CrossEntropyLoss(ignore_index=ignore_index)
        tuners.append(train(step(pad, criterion), flat, criterion, fsd_batch=fsd_batch))
    assert_same(*tuners)


@pytest.mark.parametrize("form", ["function", "partial", "argument"])
def test_the_ignore_index_of_a_functional_loss_is_known(form):
    def step(pad: bool, criterion: nn.Module):
        def one(tuner: apo.Attached, model: nn.Module, index: int) -> Tensor:
            tokens, target = sentences(index)
            target = target.clamp(max=2)
            if pad:
                tokens, target = padded(tokens, 0), padded(target, -100 if form == "function" else 3)
            options = {"ignore_index": 3} if form == "argument" else {}
            return criterion(model(tokens), target.flatten(), **options)

        return one

    loss = functools.partial(F.cross_entropy, ignore_index=3) if form == "partial" else F.cross_entropy
    tuners = []
    for pad in (True, False):
        criterion = apo.criterion(loss)
        tuners.append(train(step(pad, criterion), True, criterion))
    assert_same(*tuners)


@pytest.mark.parametrize("with_labels_of", [-100, "mask"])
@pytest.mark.parametrize("fsd_batch", ["previous", "same"])
def test_padded_labels_and_attention_masks_do_not_count(fsd_batch, with_labels_of):
    def step(pad: bool):
        def one(tuner: apo.Attached, model: nn.Module, index: int) -> Tensor:
            tokens, labels = sentences(index)
            mask = torch.ones_like(tokens)
            if pad:
                tokens, labels, mask = padded(tokens, 0), padded(labels, -100), padded(mask, 0)
            inputs = {"attention_mask": mask} if with_labels_of == "mask" else {}
            return model(input_ids=tokens, labels=labels, **inputs)["loss"]

        return one

    assert_same(*(train(step(pad), False, None, fsd_batch=fsd_batch) for pad in (True, False)))


def test_an_attention_mask_alone_is_respected():
    criterion = apo.criterion(lambda logits, target, mask: F.cross_entropy(logits[mask], target[mask]))

    class Batched(Tagger):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
            return self.head(self.embed(input_ids).tanh())

    tuners = []
    for pad in (True, False):
        torch.manual_seed(0)
        model = Batched(flat=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tuner = apo.attach(optimizer, model, criterion, interval=2, discrepancy=apo.CategoricalKL())
        for index in range(5):
            tokens, target = sentences(index)
            mask = torch.ones_like(tokens, dtype=torch.bool)
            if pad:
                tokens, target, mask = padded(tokens, 0), padded(target, 0), padded(mask, False)
            optimizer.zero_grad()
            criterion(model(input_ids=tokens, attention_mask=mask), target, mask=mask).backward()
            optimizer.step()
        tuner.detach()
        tuners.append(tuner)
    assert_same(*tuners)


def test_a_mask_of_ones_own_is_respected():
    def step(pad: bool, criterion: nn.Module):
        def one(tuner: apo.Attached, model: nn.Module, index: int) -> Tensor:
            tokens, target = sentences(index)
            if pad:
                tokens, target = padded(tokens, 0), padded(target, -100)
            return criterion(model(tokens), target.flatten())

        return one

    def mask(recording: Any) -> Tensor:
        return recording.target != -100

    def masked_loss(logits: Tensor, target: Tensor) -> Tensor:
        kept = target != -100
        return F.cross_entropy(logits[kept], target[kept])

    tuners = []
    for pad in (True, False):
        criterion = apo.criterion(masked_loss)
        options = {"discrepancy": apo.CategoricalKL(), "mask": mask}
        tuners.append(train(step(pad, criterion), True, criterion, **options))
    assert_same(*tuners)
