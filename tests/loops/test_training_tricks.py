"""Supervised training with what people add to it: mixed or attacked inputs, soft targets, averaged weights."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from tests.loops.loop import Run, assert_learns, assert_not_silently_lost, digit_batches, digits, mlp, wrong
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import apo

SGDM = functools.partial(torch.optim.SGD, momentum=0.9)


def test_mixup_of_inputs_with_two_losses_ends_near_the_best_rate():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for x, y in digit_batches(200):
            share = torch.distributions.Beta(0.4, 0.4).sample().item()
            other = torch.randperm(len(x))
            optimizer.zero_grad()
            output = model(share * x + (1 - share) * x[other])
            loss = share * criterion(output, y) + (1 - share) * criterion(output, y[other])
            loss.backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, [0.1, 0.3], short=0.05)


def test_label_smoothing_with_class_weights_ends_near_the_best_rate():
    def loop(lr, attach):
        model = mlp()
        criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 10), label_smoothing=0.1)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=lr)
        tuner, start = attach(optimizer, model, criterion), wrong(model)
        for x, y in digit_batches(200):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, [3e-3, 1e-2], short=0.05)


def test_adversarial_training_by_pgd_ends_near_the_best_rate():
    def attacked(model, criterion, x, y):
        noise = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            (gradient,) = torch.autograd.grad(criterion(model(x + noise), y), noise)
            noise = (noise + 0.05 * gradient.sign()).clamp(-0.1, 0.1).detach().requires_grad_()
        return (x + noise).detach()

    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        tuner, losses = attach(optimizer, model, criterion), []
        for x, y in digit_batches(150):
            x = attacked(model, criterion, x, y)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Run(losses[0], sum(losses[-10:]) / 10, tuner)

    assert_learns(loop, [0.1, 0.3], short=0.15)


@pytest.mark.parametrize("make_optimizer", [SGDM, torch.optim.AdamW])
def test_sharpness_aware_minimisation_ends_near_the_best_rate(make_optimizer):
    """The gradient is that of weights a little uphill: the loop moves there before the second pass, and back after."""

    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        inputs, labels, *_ = digits()
        loss_of_all = lambda: criterion(model(inputs).detach(), labels).item()  # noqa: E731
        optimizer = make_optimizer(model.parameters(), lr=lr)
        tuner, start = attach(optimizer, model, criterion), loss_of_all()
        for x, y in digit_batches(300):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            with torch.no_grad():
                length = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                uphill = [0.05 * p.grad / length for p in model.parameters()]
                torch._foreach_add_(list(model.parameters()), uphill)
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), uphill)
            optimizer.step()
        return Run(start, loss_of_all(), tuner)

    assert_learns(loop, [3e-3, 1e-2, 0.1], short=0.01)


@pytest.mark.parametrize(("make_optimizer", "rates"), [(SGDM, [0.1, 0.3]), (torch.optim.AdamW, [1e-2, 3e-2])])
def test_weights_in_bfloat16_end_near_the_best_rate(make_optimizer, rates):
    def loop(lr, attach):
        model, criterion = mlp().bfloat16(), nn.CrossEntropyLoss()
        inputs, labels, *_ = digits()
        loss_of_all = lambda: criterion(model(inputs.bfloat16()).detach().float(), labels).item()  # noqa: E731
        optimizer = make_optimizer(model.parameters(), lr=lr)
        tuner, start = attach(optimizer, model, criterion, total_steps=400), loss_of_all()
        for x, y in digit_batches(400):
            optimizer.zero_grad()
            criterion(model(x.bfloat16()), y).backward()
            optimizer.step()
        return Run(start, loss_of_all(), tuner)

    assert_learns(loop, rates, initial=1e-4, short=0.02)


def test_an_exponential_average_of_the_weights_ends_near_the_best_rate():
    def loop(lr, attach):
        model, criterion = mlp(), nn.CrossEntropyLoss()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        tuner, start = attach(optimizer, model, criterion), wrong(average)
        for x, y in digit_batches(200):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            average.update_parameters(model)
        return Run(start, wrong(average), tuner)

    assert_learns(loop, [3e-3, 1e-2], short=0.05)


def swa_loop(lr, attach):
    model, criterion = mlp(), nn.CrossEntropyLoss()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    tuner, start = attach(optimizer, model, criterion), wrong(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=5)
    for step, (x, y) in enumerate(digit_batches(200)):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        if step >= 140:
            average.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
    return Run(start, wrong(average), tuner)


def test_stochastic_weight_averaging_with_swalr_works_or_is_refused():
    assert_not_silently_lost(swa_loop, [0.1, 0.3], initial=0.02, short=0.05, about="SWALR")


def test_stochastic_weight_averaging_with_swalr_from_a_wrong_rate_works_or_is_refused():
    assert_not_silently_lost(swa_loop, [0.1, 0.3], initial=1e-5, short=0.05, about="SWALR")


def test_distillation_with_a_criterion_of_its_own_ends_near_the_best_rate():
    torch.manual_seed(1)
    teacher = mlp(hidden=100)
    trainer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for x, y in digit_batches(150):
        trainer.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        trainer.step()

    def distill(student, soft, hard):
        targets = F.softmax(soft / 2, dim=1)
        soft_loss = F.kl_div(F.log_softmax(student / 2, dim=1), targets, reduction="batchmean")
        return 0.7 * 4 * soft_loss + 0.3 * F.cross_entropy(student, hard)

    def loop(lr, attach):
        model, criterion = mlp(hidden=20), apo.criterion(distill)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        tuner, start = attach(optimizer, model, criterion, discrepancy=apo.CategoricalKL()), wrong(model)
        for x, y in digit_batches(200):
            with torch.no_grad():
                soft = teacher(x)
            optimizer.zero_grad()
            criterion(model(x), soft, y).backward()
            optimizer.step()
        return Run(start, wrong(model), tuner)

    assert_learns(loop, [1e-2, 3e-2], short=0.05)
