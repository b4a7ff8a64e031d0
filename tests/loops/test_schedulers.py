"""Schedulers of torch around a learned rate: they shape it, or are refused where they cannot."""

from __future__ import annotations

import math

import pytest
import torch
from tests.loops.loop import (
    Run,
    assert_learns,
    assert_not_silently_lost,
    digit_batches,
    mlp,
    wrong,
)
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import apo

STEPS = 200
RATES = [0.1, 0.3]


def loop_with(scheduler, scheduler_first=False):
    """Return a loop whose scheduler, built by ``scheduler(optimizer, lr)``, is stepped after every batch."""

    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        made = scheduler(optimizer, lr) if scheduler_first else None
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        made = made or scheduler(optimizer, lr)
        for x, y in digit_batches(STEPS):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            if isinstance(made, lr_scheduler.ReduceLROnPlateau):
                made.step(loss.item())
            else:
                made.step()
        return Run(start, wrong(model), tuner)

    return loop


SHAPES = {
    "OneCycleLR": lambda optimizer, lr: lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=STEPS + 1, cycle_momentum=False
    ),
    "LambdaLR with warm-up": lambda optimizer, lr: lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - step / STEPS)
    ),
    "CosineAnnealingLR": lambda optimizer, lr: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "ReduceLROnPlateau": lambda optimizer, lr: lr_scheduler.ReduceLROnPlateau(optimizer, patience=30),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_scheduler_shapes_the_learned_rate(name):
    assert_learns(loop_with(SHAPES[name]), RATES, initial=1e-5, short=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("build", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_a_rate_does_not_fall_twice_under_a_cosine(build):
    """Curvature grows where steps become shorter, so a rate that followed it would fall with the factor and by it."""
    steps, learned = 600, {}
    torch.manual_seed(0)
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = build(model.parameters())
    tuner = apo.attach(optimizer, model, criterion)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step, (x, y) in enumerate(digit_batches(steps)):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        learned[step] = tuner.rule.learned_rates()[0]
    assert learned[steps - 1] > 0.8 * learned[steps // 4]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_a_scheduler_that_was_built_before_attaching_shapes_the_learned_rate(name):
    assert_learns(loop_with(SHAPES[name], scheduler_first=True), RATES, initial=1e-5, short=0.06)


def test_one_cycle_with_momentum_cycled_ends_near_the_best_rate():
    def one_cycle(optimizer, lr):
        return lr_scheduler.OneCycleLR(optimizer, max_lr=10 * lr, total_steps=STEPS + 1)

    assert_learns(loop_with(one_cycle), [0.01, 0.03], initial=1e-6, short=0.06)


@pytest.mark.parametrize("scheduler_first", [False, True], ids=["built after", "built before"])
def test_cyclic_lr_works_or_is_refused(scheduler_first):
    def cyclic(optimizer, lr):
        return lr_scheduler.CyclicLR(optimizer, base_lr=lr / 10, max_lr=lr, step_size_up=20, cycle_momentum=False)

    loop = loop_with(cyclic, scheduler_first)
    assert_not_silently_lost(loop, RATES, initial=1e-4, short=0.06, about="CyclicLR")


@pytest.mark.parametrize("scheduler_first", [False, True], ids=["built after", "built before"])
def test_cyclic_lr_around_an_optimizer_at_its_base_works_or_is_refused(scheduler_first):
    def cyclic(optimizer, lr):
        return lr_scheduler.CyclicLR(optimizer, base_lr=lr, max_lr=100 * lr, step_size_up=20, cycle_momentum=False)

    loop = loop_with(cyclic, scheduler_first)
    assert_not_silently_lost(loop, [1e-3, 3e-3], initial=1e-3, short=0.06, about="CyclicLR")


@pytest.mark.parametrize("initial", [1e-5, 1e-2, 10.0])
def test_warm_up_followed_by_reduce_on_plateau_never_raises_the_rate(initial):
    rates = []

    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=6)
        rates.clear()
        for step, (x, y) in enumerate(digit_batches(STEPS)):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            before = float(optimizer.param_groups[0]["lr"])
            if step < 20:
                warm_up.step()
            else:
                plateau.step(loss.item())
                rates.append((before, float(optimizer.param_groups[0]["lr"])))
        return Run(start, wrong(model), tuner)

    assert_not_silently_lost(loop, RATES, initial, short=0.1, about="ReduceLROnPlateau")
    assert any(after < before for before, after in rates), "nothing was reduced"
    assert all(after <= before * 1.0001 for before, after in rates), "a reduction raised the rate"


@pytest.mark.parametrize("initial", [1e-5, 0.02, 10.0])
def test_swalr_alone_works_or_is_refused(initial):
    def swa(optimizer, lr):
        return SWALR(optimizer, swa_lr=0.05, anneal_epochs=10)

    assert_not_silently_lost(loop_with(swa), RATES, initial, short=0.06, about="SWALR")


def test_a_rate_that_is_multiplied_by_hand_is_a_schedule():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for step, (x, y) in enumerate(digit_batches(STEPS)):
            if step in (100, 150):
                for group in optimizer.param_groups:
                    group["lr"] *= 0.1
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    run = assert_learns(loop, RATES, initial=1e-5, short=0.06)
    in_force = float(run.tuner.optimizer.param_groups[0]["lr"])
    assert math.isclose(in_force, 0.01 * run.tuner.rule.learned_rates()[0], rel_tol=1e-6)


def test_layers_that_join_in_a_warm_up_bear_the_rate_after_it():
    """Unfrozen at a fiftieth of the rate, they must not take what this part bears for what all of it would."""
    highest = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model, criterion = mlp(), nn.CrossEntropyLoss()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        apo.attach(optimizer, model, criterion)
        warm_up = lr_scheduler.LambdaLR(
            optimizer, lambda step: 1.0 if step < 200 else min(1.0, 0.02 + (step - 200) / 100)
        )
        losses = []
        for step, (x, y) in enumerate(digit_batches(320)):
            if step == 200:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            warm_up.step()
            losses.append(loss.item())
        highest.append(max(losses[200:]) / (sum(losses[190:200]) / 10))
    assert max(highest) < 2.5, highest


def test_a_rate_that_is_not_compared_looks_ahead_at_all_of_it_under_a_scheduler():
    def learned(scheduled):
        torch.manual_seed(0)
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tuner = apo.attach(optimizer, model, criterion, fsd_batch="same", interval=10)
        drop = lr_scheduler.LambdaLR(optimizer, lambda step: 0.05 if scheduled and step >= 200 else 1.0)
        for x, y in digit_batches(400):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            drop.step()
        return tuner.rule.learned_rates()[0]

    assert learned(scheduled=True) < 1.5 * learned(scheduled=False)
