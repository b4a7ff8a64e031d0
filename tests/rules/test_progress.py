"""A rate that climbs without progress goes back, and a loss that is back at its first value lowers the rate."""

from __future__ import annotations

import math

import pytest
import torch

from apo.rules.progress import Progress


def follow(progress, losses, log_rates):
    """Observe losses ten steps apart, from wherever the progress stands."""
    first = progress.state_dict()["_count"]
    pairs = enumerate(zip(losses, log_rates, strict=True), start=first)
    return [progress.observe(10 * count, loss, rate) for count, (loss, rate) in pairs]


def test_a_falling_loss_lets_the_rate_climb():
    progress = Progress()
    assert not any(
        v is not None for v in follow(progress, [2.0 * 0.97**k for k in range(60)], [0.2 * k for k in range(60)])
    )
    assert not progress.is_late(1000)


def test_a_noisy_loss_that_falls_slowly_lets_the_rate_climb():
    torch.manual_seed(0)
    noise = (0.2 * torch.randn(300)).tolist()
    losses = [2.0 * 0.99**k + noise[k] * 0.99**k for k in range(300)]
    assert not any(v is not None for v in follow(Progress(), losses, [0.01 * k for k in range(300)]))


def test_a_rate_that_climbs_fourfold_without_progress_goes_back_to_the_last_progress_and_may_not_pass_it():
    progress = Progress()
    follow(progress, [2.0 * 0.95**k for k in range(20)] + [0.75] * 40, [0.0] * 60)  # the average has settled
    verdicts = follow(progress, [0.75] * 40, [0.1 * k for k in range(40)])
    first = next(index for index, verdict in enumerate(verdicts) if verdict is not None)
    assert first == 14  # e ** 1.4 is the first above 4
    assert verdicts[first] == 0.0
    assert follow(progress, [0.75], [0.05]) == [0.0]
    assert not any(v is not None for v in follow(progress, [0.1] * 20, [0.05] * 20))  # there is progress again


def test_a_loss_back_at_its_first_value_lowers_the_rate_to_a_tenth():
    progress = Progress()
    follow(progress, [2.0 * 0.9**k for k in range(10)], [0.0] * 10)
    verdicts = [verdict for verdict in follow(progress, [2.5] * 60, [0.0] * 60) if verdict is not None]
    assert verdicts[0] == pytest.approx(-math.log(10))


def test_a_loss_that_never_falls_has_not_begun():
    progress = Progress()
    follow(progress, [2.3, 40.0, 2.31, 2.3] * 10, [0.0] * 40)
    assert progress.is_late(130) and not progress.is_late(120)


def test_losses_below_zero_are_followed_as_well():
    progress = Progress()
    assert not any(
        v is not None for v in follow(progress, [-1.0 - 0.05 * k for k in range(60)], [0.1 * k for k in range(60)])
    )
    assert not progress.is_late(1000)


def test_it_continues_from_its_state():
    one, other = Progress(), Progress()
    follow(one, [2.0, 1.9, 1.8, 1.9], [0.0, 0.1, 0.2, 0.3])
    other.load_state_dict(one.state_dict())
    later = [1.9] * 30, [0.1 * k for k in range(30)]
    assert follow(one, *later) == follow(other, *later)
