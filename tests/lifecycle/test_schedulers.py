from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.lifecycle.harness import DOORS, Run, kronecker, saved_and_loaded, sgdm, two_groups
from torch import nn
from torch.optim import SGD, lr_scheduler

import apo
from apo.rules.param_groups import Rate


def sequential(optimizer):
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.ExponentialLR(optimizer, 0.8)], [5])


def from_zero(step: int) -> float:
    return min(1.0, step / 4)  # as Hugging Face's schedules start


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.1),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "CosineAnnealingLR down to zero and up again": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LambdaLR from zero": lambda o: lr_scheduler.LambdaLR(o, from_zero),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=6),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, total_iters=4),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 20, 2.0),
    "SequentialLR": sequential,
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[g["lr"] for g in o.param_groups], total_steps=20),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
}


def factors(make, steps: int) -> list[float]:
    """Return what the scheduler multiplies a plain optimizer's rate with; OneCycleLR's base is its maximum."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    scheduler = make(optimizer)
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def assert_rate_is_learned_rate_times(run: Run, factor: float) -> None:
    rates = [float(group["lr"]) for group in run.optimizer.param_groups]
    expected = [rate * factor for rate in run.tuner.rule.learned_rates()]
    assert rates == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("door", DOORS)
def test_a_schedulers_factor_multiplies_the_learned_rate(door, name):
    run = Run(door, lambda model: apo.LearningRate(SGD(two_groups(model), lr=0.1, momentum=0.9)))
    scheduler = SCHEDULERS[name](run.optimizer)
    expected = factors(SCHEDULERS[name], 12)
    assert_rate_is_learned_rate_times(run, expected[0])
    before = run.tuner.rule.learned_rates()
    for index in range(12):
        run.step(*run.batch(index))
        assert_rate_is_learned_rate_times(run, expected[index])
        scheduler.step()
        assert_rate_is_learned_rate_times(run, expected[index + 1])
    assert run.tuner.rule.learned_rates() != pytest.approx(before, rel=0.1)
    # With interval 3 the last of twelve steps that learned is number 9.
    assert run.tuner.history[-1].lr == pytest.approx([rate * expected[9] for rate in run.tuner.rule.learned_rates()])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_was_there_before_apo_is_understood_too(name):
    made = []

    def rule(model):
        optimizer = sgdm(model)
        made.append(SCHEDULERS[name](optimizer))
        return optimizer

    run, expected = Run("attached", rule), factors(SCHEDULERS[name], 12)
    assert run.tuner.rule.learned_rates() == pytest.approx([0.05])
    for index in range(12):
        assert_rate_is_learned_rate_times(run, expected[index])
        run.step(*run.batch(index))
        made[0].step()
    assert_rate_is_learned_rate_times(run, expected[12])


@pytest.mark.parametrize("name", ["StepLR", "LambdaLR", "SequentialLR", "OneCycleLR"])
@pytest.mark.parametrize("rule", ["kronecker", "rate and momentum"])
def test_other_rules_follow_a_scheduler_as_well(rule, name):
    run, expected = Run("attached", rule), factors(SCHEDULERS[name], 8)
    scheduler = SCHEDULERS[name](run.optimizer)
    for index in range(8):
        run.step(*run.batch(index))
        scheduler.step()
        learned = 0.05 if rule == "kronecker" else math.exp(float(run.tuner.rule.phi()[0]))
        assert run.lr == pytest.approx(learned * expected[index + 1])


def test_the_weights_move_at_the_scheduled_rate_on_a_meta_step():
    moved = []
    for factor in (1.0, 0.25):
        run = Run("attached", "paper", interval=1)
        scheduler = lr_scheduler.LambdaLR(run.optimizer, lambda step, factor=factor: factor)
        before = run.weights()
        run.step(*run.batch(0))
        scheduler.step()
        moved.append([after - start for after, start in zip(run.weights(), before, strict=True)])
    for whole, quarter in zip(*moved, strict=True):
        torch.testing.assert_close(quarter, 0.25 * whole, rtol=1e-3, atol=1e-7)


def test_the_schedule_does_not_enter_what_is_learned():
    runs = [Run("attached", "paper", interval=1), Run("attached", "paper", interval=1)]
    lr_scheduler.LambdaLR(runs[1].optimizer, lambda step: 0.1)
    for run in runs:
        run.step(*run.batch(0))
    assert runs[0].tuner.rule.learned_rates() == runs[1].tuner.rule.learned_rates()


@pytest.mark.parametrize("door", DOORS)
def test_reduce_on_plateau_multiplies_the_learned_rate(door):
    run = Run(door)
    scheduler = lr_scheduler.ReduceLROnPlateau(run.optimizer, factor=0.5, patience=0)
    run.train(range(1))
    scheduler.step(1.0)
    assert_rate_is_learned_rate_times(run, 1.0)
    for worse in (2.0, 3.0):
        scheduler.step(worse)
    assert_rate_is_learned_rate_times(run, 0.25)
    run.train(range(1, 5))
    assert_rate_is_learned_rate_times(run, 0.25)


@pytest.mark.parametrize("rule", ["sgdm", "rate and momentum"])
@pytest.mark.parametrize("door", DOORS)
def test_a_factor_by_hand_stays(door, rule):
    run = Run(door, rule).train(range(2))
    before = run.lr
    run.optimizer.param_groups[0]["lr"] *= 0.5
    assert run.lr == pytest.approx(0.5 * before)
    run.train(range(2, 8))
    assert run.lr == pytest.approx(0.5 * math.exp(float(run.tuner.rule.phi()[0])))


@pytest.mark.parametrize("door", DOORS)
def test_a_rate_set_by_hand_is_the_rate_in_force(door):
    run = Run(door).train(range(2))
    run.optimizer.param_groups[0]["lr"] = 0.0125
    assert run.lr == 0.0125
    run.optimizer.param_groups[0].update(lr=0.03)  # past __setitem__
    run.train(range(2, 3))
    assert run.lr == pytest.approx(0.03)
    run.optimizer.param_groups[0]["lr"] = 0.0
    before = run.weights()
    run.train(range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(before, run.weights(), strict=True))
    run.optimizer.param_groups[0]["lr"] = 0.01
    assert run.lr == pytest.approx(0.01)


def test_numbers_of_numpy_are_understood():
    numpy = pytest.importorskip("numpy")
    run = Run("attached").train(range(4))
    scheduler = lr_scheduler.LambdaLR(run.optimizer, lambda step: numpy.float64(0.5))
    assert_rate_is_learned_rate_times(run, 0.5)
    run.train(range(4, 8), scheduler)
    assert_rate_is_learned_rate_times(run, 0.5)
    run.optimizer.param_groups[0]["lr"] = numpy.float64(0.5) * run.optimizer.param_groups[0]["lr"]
    assert_rate_is_learned_rate_times(run, 0.25)


def test_a_rate_is_a_number_to_numpy():
    numpy = pytest.importorskip("numpy")
    rate = Rate(0.25)
    assert numpy.log2(rate) == -2.0
    assert not numpy.isnan(rate)
    assert numpy.maximum(rate, 1.0) == 1.0
    for array in (numpy.array([1.0, 2.0]) * rate, rate * numpy.array([1.0, 2.0])):
        assert array.tolist() == [0.25, 0.5]
    for number in (numpy.float64(0.5), numpy.float32(0.5), numpy.int64(2)):
        for made in (number * rate, rate * number, number + rate, number - rate, rate - number, rate / number):
            assert type(made) is Rate
        assert float(number - rate) == float(number) - 0.25
        assert (number / rate, number**rate) == (float(number) / 0.25, float(number) ** 0.25)
        assert (number > rate, rate < number, number == rate, rate != number) == (True, True, False, True)
    assert numpy.float32(0.25) == rate and rate == numpy.float32(0.25) and hash(rate) == hash(0.25)


def test_a_rate_times_a_tensor_is_a_tensor():
    rate, tensor = Rate(0.25), torch.ones(2)
    for made in (rate * tensor, tensor * rate, rate / (4 * tensor) * 4, rate + 0 * tensor, (rate + tensor) - tensor):
        assert torch.equal(made, 0.25 * tensor)
    assert (rate * torch.tensor(2.0)).shape == ()  # the gradient of a parameter that is a number


class WrittenByHand(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


@pytest.mark.parametrize("door", DOORS)
def test_an_optimizer_may_multiply_its_rate_with_gradients(door):
    by_hand = Run(door, lambda model: WrittenByHand(model.parameters(), lr=0.1)).train(range(7))
    assert by_hand.lr == pytest.approx(Run(door, lambda model: SGD(model.parameters(), lr=0.1)).train(range(7)).lr)


def test_the_cycle_of_a_scheduler_that_is_built_after_attaching_ends_at_the_learned_rate():
    run = Run("attached", lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9))
    scheduler = lr_scheduler.CyclicLR(run.optimizer, 1e-3, 0.1, step_size_up=4, cycle_momentum=False)
    for index, factor in enumerate((0.01, 0.2575, 0.505, 0.7525, 1.0, 0.7525)):
        run.train(range(index, index + 1))
        assert_rate_is_learned_rate_times(run, factor)
        scheduler.step()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedulers_state_goes_through_a_safe_load(name):
    run = Run("attached").train(range(2))
    scheduler = SCHEDULERS[name](run.optimizer)
    run.train(range(2, 5), scheduler)
    if "Lambda" in name or "Multiplicative" in name:  # torch leaves out functions
        assert saved_and_loaded(scheduler.state_dict())["last_epoch"] == 3
        return
    other = Run("attached")
    twin = SCHEDULERS[name](other.optimizer)
    twin.load_state_dict(saved_and_loaded(scheduler.state_dict()))
    other.optimizer.load_state_dict(saved_and_loaded(run.optimizer.state_dict()))
    for each, schedule in ((run, scheduler), (other, twin)):
        each.optimizer.step()
        schedule.step()
    assert run.lr == other.lr
    assert scheduler.get_last_lr() == twin.get_last_lr() == [run.lr]


def test_a_schedule_does_not_make_the_preconditioner_grow():
    runs = [Run("attached", kronecker, interval=1), Run("attached", kronecker, interval=1)]
    lr_scheduler.LambdaLR(runs[1].optimizer, lambda step: 0.1)
    for run in runs:
        run.step(*run.batch(0))
    for one, other in zip(runs[0].optimizer.factors(), runs[1].optimizer.factors(), strict=True):
        assert torch.equal(one, other)
