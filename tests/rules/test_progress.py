"""A rate that climbs without progress goes back, and a loss that is back at its first value lowers the rate."""

from __future__ import annotations

import math

import pytest
import torch

from apo.rules.progress import Progress


def follow(progress, losses, log_rates):
    """Observe losses ten steps apart, from wherever the progress stands; return the rates that are allowed."""
    first = progress.state_dict()["_count"]
    pairs = enumerate(zip(losses, log_rates, strict=True), start=first)
    return [progress.observe(10 * count, loss, rate) for count, (loss, rate) in pairs]


def falls(verdicts):
    return [index for index, (_, had_to_fall) in enumerate(verdicts) if had_to_fall]


CLIMB = [0.1 * k for k in range(60)]


@pytest.mark.parametrize("losses", [[2.0 * 0.97**k for k in range(60)], [-1.0 - 0.05 * k for k in range(60)]])
def test_a_falling_loss_lets_the_rate_climb(losses):
    progress = Progress()
    verdicts = follow(progress, losses, CLIMB)
    assert not falls(verdicts) and [rate for rate, _ in verdicts] == CLIMB


def test_a_noisy_loss_that_falls_slowly_lets_the_rate_climb():
    torch.manual_seed(0)
    noise = (0.2 * torch.randn(300)).tolist()
    losses = [2.0 * 0.99**k + noise[k] * 0.99**k for k in range(300)]
    assert not falls(follow(Progress(), losses, [0.01 * k for k in range(300)]))


def test_a_rate_that_climbs_fourfold_without_progress_goes_back_to_the_last_progress_and_may_not_pass_it():
    progress = Progress()
    follow(progress, [2.0 * 0.95**k for k in range(20)] + [0.75] * 40, [0.0] * 60)  # the average has settled
    verdicts = follow(progress, [0.75] * 40, CLIMB[:40])
    assert falls(verdicts)[0] == 14  # e ** 1.4 is the first above 4
    assert verdicts[14][0] == 0.0
    assert follow(progress, [0.75], [0.05]) == [(0.0, False)]  # it stays there, without another word
    assert follow(progress, [0.1] * 20, [0.05] * 20)[-1] == (0.05, False)  # there is progress again


def test_a_level_holds_the_rate_until_there_is_progress():
    progress = Progress()
    progress.hold_below(-1.0)
    assert (
        follow(progress, [2.0] * 5, [-2.0, -1.5, -0.5, 0.0, 0.5])
        == [(-2.0, False), (-1.5, False)] + [(-1.0, False)] * 3
    )
    assert follow(progress, [1.0] * 5, [0.5] * 5)[-1] == (0.5, False)


def test_a_loss_back_at_its_first_value_lowers_the_rate_to_a_tenth():
    progress = Progress()
    follow(progress, [2.0 * 0.9**k for k in range(10)], [0.0] * 10)
    verdicts = follow(progress, [2.5] * 60, [0.0] * 60)
    assert verdicts[falls(verdicts)[0]][0] == pytest.approx(-math.log(10))


def test_a_loss_far_above_its_first_value_has_exploded():
    progress = Progress()
    follow(progress, [2.3, 9.0], [0.0] * 2)
    assert not progress.has_exploded and not Progress().has_exploded
    follow(progress, [9.5, 2.3], [0.0] * 2)
    assert progress.has_exploded


def test_it_continues_from_its_state():
    one, other = Progress(), Progress()
    follow(one, [2.0, 1.9, 1.8, 1.9], [0.0, 0.1, 0.2, 0.3])
    other.load_state_dict(one.state_dict())
    assert follow(one, [1.9] * 30, CLIMB[:30]) == follow(other, [1.9] * 30, CLIMB[:30])
