"""The course of a training: a start has a meta-step at every step, and at the end a rate that has arrived rests."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import apo
from apo.rules.base import Comparison, Outcome
from apo.rules.cadence import Cadence


def test_a_start_takes_fifty_steps_and_longer_while_the_rate_is_far_below_its_target():
    for lag, hurries, last in ((0.0, True, 50), (1.1, True, 100), (1.1, False, 50)):
        cadence = Cadence()
        cadence.start()
        ends = next(
            step for step in range(200) if not (cadence.observe(step, lag, hurries=hurries), cadence.is_start)[1]
        )
        assert ends == last


def test_leaving_a_plateau_is_a_start_of_its_own():
    cadence = Cadence()
    cadence.start()
    cadence.observe(300)
    assert not cadence.is_start
    cadence.observe(310, again=True)
    assert cadence.is_start
    cadence.observe(360)
    assert not cadence.is_start


def test_without_a_first_start_there_is_no_other():
    cadence = Cadence()
    cadence.observe(310, lag=2.0, again=True)
    assert not cadence.is_start


def test_only_a_start_is_in_a_hurry():
    cadence = Cadence()
    cadence.start()
    assert [cadence.pace(step, 2.0) for step in (0, 24, 25, 400)] == [2.0, 2.0, 1.0, 1.0]
    cadence.observe(300, again=True)
    assert [cadence.pace(step, 2.0) for step in (310, 340)] == [2.0, 1.0]


@pytest.mark.parametrize(("lag", "rests"), [(-2.0, True), (0.3, True), (0.5, False)])
def test_a_rate_rests_at_the_end_if_it_has_arrived(lag, rests):
    cadence = Cadence()
    cadence.observe(100, lag)
    assert not cadence.rests(fade=1.0)
    assert cadence.rests(fade=0.99) is rests


class Course:
    """A rule whose look-aheads turn where the test says, at the middle of its training."""

    def __init__(self, turn: float = 0.1, lr: float = 0.165, **options):
        self.optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=lr)
        self.rule = apo.LearningRate(self.optimizer, **options)
        self.step = 0
        for _ in range(60):
            self.look(turn)

    def look(self, turn: float, fade: float = 1.0) -> float:
        """Look ahead once, with a quadratic model that is exact; return the learned rate."""
        self.rule.before_step(fade)
        ahead = self.rule.rates_ahead()[0]
        comparison = Comparison(ahead, ahead**2 / turn, ahead, ahead**2 / turn, 0.0)
        outcome = Outcome(self.step, 1.0 / (1 + self.step), 0.5, share=0.3, comparison=comparison)
        self.rule.meta_update([torch.tensor(0.0)], outcome)
        self.rule.after(outcome)
        self.step += 10
        return self.rule.learned_rates()[0]


FADES = [1 - i / 50 for i in range(1, 50)]


def test_where_curvature_follows_the_factor_down_the_rate_falls_once_and_not_twice():
    course = Course()
    learned = course.rule.learned_rates()[0]
    assert learned == pytest.approx(course.rule.over_relaxation * 0.1, rel=0.05)  # it has arrived
    for fade in FADES:
        course.look(0.1 * fade, fade)
    # The average that the turning point is taken from lags behind, on the side of larger rates.
    assert course.rule.learned_rates()[0] == pytest.approx(learned, rel=0.05)
    assert course.optimizer.param_groups[0]["lr"] == pytest.approx(course.rule.learned_rates()[0] * FADES[-1])


def test_a_rate_that_rests_does_not_rise():
    course = Course()
    learned = course.rule.learned_rates()[0]
    for fade in FADES:
        course.look(0.1, fade)  # the rate in force is ever further below the turning point
    assert course.rule.learned_rates()[0] == learned


def test_a_rate_that_rests_falls_if_even_the_rate_in_force_is_beyond_the_turning_point():
    course = Course()
    learned = course.rule.learned_rates()[0]
    for fade in FADES[:25]:
        course.look(0.01 * fade, fade)
    assert 0.1 * learned < course.rule.learned_rates()[0] < 0.15 * learned  # the average lags a little behind


def test_a_rate_that_is_far_below_its_target_when_the_end_begins_still_rises():
    course = Course(turn=0.1, lr=0.0005)
    assert course.rule.learned_rates()[0] < 0.2
    before = course.rule.learned_rates()[0]
    for _ in range(3):
        course.look(1.0)
    assert course.look(1.0, 0.98) > before
    for fade in FADES[1:]:
        course.look(1.0, fade)
    # Until it is near, then it rests.
    assert course.rule.learned_rates()[0] == pytest.approx(course.rule.over_relaxation / 1.5, rel=0.15)


def test_a_network_on_its_plateau_has_not_arrived():
    """Its loss has never fallen, and the rate that will end the plateau is still ahead of it."""
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    rule = apo.LearningRate(optimizer)
    rule.before_step(0.5)
    assert rule.rates_ahead() == pytest.approx([0.1 / rule.over_relaxation])


@pytest.mark.parametrize("options", [{"meta_optimizer": torch.optim.RMSprop}, {"over_relaxation": 1.4}])
def test_a_rate_that_moves_by_a_meta_optimizer_looks_ahead_as_if_there_were_no_end(options):
    course = Course(**options)
    learned = course.rule.learned_rates()[0]
    course.rule.before_step(0.5)
    assert course.rule.rates_ahead() == pytest.approx([learned / course.rule.over_relaxation])


def test_a_rule_that_rests_continues_from_its_state_bit_for_bit():
    whole, resumed = Course(), Course(lr=0.3)
    for fade in FADES[:20]:
        whole.look(0.05 * fade, fade)
    resumed.rule.load_state_dict(whole.rule.state_dict())
    resumed.step = whole.step
    for fade in FADES[20:30]:
        assert whole.look(0.04 * fade, fade) == resumed.look(0.04 * fade, fade)
        assert whole.rule.rates_ahead() == resumed.rule.rates_ahead()


def test_files_written_before_the_rule_had_a_cadence_load():
    course = Course()
    state = {name: value for name, value in course.rule.state_dict().items() if name != "cadence"}
    rule = apo.LearningRate(torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.3))
    rule.load_state_dict(state)
    assert rule.learned_rates() == course.rule.learned_rates()


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_scheduler_of_the_users_leaves_the_look_ahead_at_the_learned_rate(scheduled):
    torch.manual_seed(0)
    model = nn.Linear(5, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rule = apo.LearningRate(optimizer)
    tuner = apo.APO(rule, model, F.mse_loss, total_steps=240, interval=1)
    if scheduled:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(200, 8, 5, generator=generator).double()
    for x in inputs:
        tuner.step(x, x[:, :2] + 0.1 * torch.randn(8, 2, generator=generator).double())
    factor = rule.rates_ahead()[0] * rule.over_relaxation / rule.learned_rates()[0]
    assert factor == pytest.approx(1.0 if scheduled else 1 - (199 / 240 - 0.5) / 0.5)
    assert math.isfinite(rule.learned_rates()[0])
