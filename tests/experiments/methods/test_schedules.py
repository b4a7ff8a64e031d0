"""Schedules are what their names say, and multiply the rate that APO learns."""

from __future__ import annotations

import pytest
import torch
from tests.experiments.methods.conformance import STEPS, build, classification, take_steps

from apo_experiments.errors import UserError
from apo_experiments.methods.hyper import COMMON
from apo_experiments.methods.schedules import schedule_factor
from apo_experiments.problem import Budget


def factor(steps: int = 100, **changes: object):
    return schedule_factor(COMMON | changes, Budget(steps, 10))


def test_step_schedule_decays_by_five_at_30_60_and_80_percent_by_default():
    values = [factor(schedule="step")(step) for step in (0, 29, 30, 59, 60, 79, 80, 99)]
    assert values == pytest.approx([1, 1, 0.2, 0.2, 0.04, 0.04, 0.008, 0.008])


def test_inverse_square_root_rises_to_one_and_falls_like_its_name():
    at = factor(10_000, schedule="inverse-sqrt", schedule_warmup=400)
    assert at(0) == pytest.approx(1 / 400) and at(399) == 1.0
    assert at(1599) == pytest.approx(0.5)
    assert at(400) < 1.0


def test_cosine_rises_then_falls_to_zero_at_the_end():
    at = factor(schedule="cosine", schedule_warmup=20)
    assert at(9) == 0.5 and at(20) == 1.0
    assert at(60) == pytest.approx(0.5) and at(100) == pytest.approx(0.0)


def test_warm_cosine_rises_over_a_twentieth_of_any_run():
    for steps in (100, 2000):
        at = factor(steps, schedule="warm-cosine")
        assert at(steps // 20 - 1) == 1.0 and at(steps // 40 - 1) < 1.0 and at(steps) == pytest.approx(0.0)
    assert factor(3, schedule="warm-cosine")(0) == 1.0


def test_fixed_is_one():
    assert [factor()(step) for step in (0, 50, 99)] == [1.0, 1.0, 1.0]


def test_unknown_schedule_is_named():
    with pytest.raises(UserError, match="'exponential'"):
        factor(schedule="exponential")


@pytest.mark.parametrize("milestones", [(60.0, 120.0, 160.0), (0.5, -0.1), (float("nan"),)])
def test_milestones_that_are_no_fractions_are_refused(milestones):
    with pytest.raises(UserError, match=r"milestones was .*: they are fractions of the run"):
        factor(schedule="step", milestones=milestones)


def test_plain_rate_follows_the_schedule():
    task = classification()
    stepper = build("sgdm", task, {"lr": 0.1, "schedule": "step", "milestones": (0.5,), "decay": 0.1})
    rates = []
    for _ in range(STEPS):
        rates.append(stepper.rate())
        take_steps(stepper, task, 1)
    assert rates == pytest.approx([0.1] * 30 + [0.01] * 30)


def test_schedule_multiplies_the_learned_rate():
    task = classification()
    stepper = build("sgdm-apo", task, {"schedule": "step", "milestones": (0.5,), "decay": 0.1, "interval": 7})
    take_steps(stepper, task, 45)
    learned = stepper.tuner.rule.learned_rates()[0]  # type: ignore[attr-defined]
    assert stepper.rate() == pytest.approx(0.1 * learned, rel=1e-9)


def test_schedule_scales_the_preconditioned_step_and_its_warm_up():
    task = classification()
    stepper = build(
        "apo-precond", task, {"schedule": "step", "milestones": (0.5,), "decay": 0.1, "lr": 0.3, "warmup_lr": 0.02}
    )
    take_steps(stepper, task, 31)
    optimizer = stepper.tuner.optimizer  # type: ignore[attr-defined]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.03)
    assert optimizer.warmup.param_groups[0]["lr"] == pytest.approx(0.002)
    assert torch.isfinite(torch.tensor(stepper.rate()))
