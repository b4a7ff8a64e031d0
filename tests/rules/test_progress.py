"""A rate that climbs without progress goes back; a network that is lost is noticed."""

from __future__ import annotations

import math

import pytest
import torch

from apo.rules.base import Outcome, Standing
from apo.rules.progress import Progress


def follow(progress, losses, log_rates, silent=0.0, setback=None):
    """Observe losses ten steps apart, from wherever the progress stands; return allowed rates and standings.

    ``setback`` is by how much each loss is above that of the last good weights on the same batch.
    """
    compare = None if setback is None else lambda: setback
    first = follow.counts.setdefault(id(progress), 0)
    follow.counts[id(progress)] += len(losses)
    pairs = enumerate(zip(losses, log_rates, strict=True), start=first)
    return [
        (progress.observe(Outcome(10 * n, loss, loss, silent=silent, setback=compare), rate), progress.standing)
        for n, (loss, rate) in pairs
    ]


@pytest.fixture(autouse=True)
def counts():
    follow.counts = {}


def where(verdicts, standing):
    return [index for index, (_, found) in enumerate(verdicts) if found is standing]


CLIMB = [0.1 * k for k in range(60)]


@pytest.mark.parametrize("losses", [[2.0 * 0.97**k for k in range(60)], [-1.0 - 0.05 * k for k in range(60)]])
def test_a_falling_loss_lets_the_rate_climb(losses):
    verdicts = follow(Progress(), losses, CLIMB)
    assert not where(verdicts, Standing.HELD_BACK) and [rate for rate, _ in verdicts] == CLIMB
    assert len(where(verdicts, Standing.BETTER)) > 30


def test_a_noisy_loss_that_falls_slowly_lets_the_rate_climb():
    torch.manual_seed(0)
    noise = (0.2 * torch.randn(300)).tolist()
    losses = [2.0 * 0.99**k + noise[k] * 0.99**k for k in range(300)]
    verdicts = follow(Progress(), losses, [0.01 * k for k in range(300)])
    assert not where(verdicts, Standing.HELD_BACK) and not where(verdicts, Standing.LOST)


def test_without_progress_the_rate_climbs_to_four_times_that_of_the_last_and_then_goes_back():
    progress = Progress()
    follow(progress, [2.0 * 0.95**k for k in range(20)] + [0.75] * 40, [0.0] * 60)  # the average has settled
    verdicts = follow(progress, [0.75] * 40, CLIMB[:40])
    held = where(verdicts, Standing.HELD_BACK)
    assert held == [14]  # once: e ** 1.4 is the first above 4
    assert verdicts[13][0] == CLIMB[13] and verdicts[14][0] == 0.0
    assert follow(progress, [0.75], [0.05]) == [(0.0, Standing.AS_BEFORE)]  # it stays there, without another word
    assert follow(progress, [0.1] * 20, [0.05] * 20)[-1][0] == 0.05  # there is progress again


def test_a_rate_that_leaps_is_held_at_four_times_that_of_the_last_progress_and_climbs_by_a_percent_a_step():
    progress = Progress()
    follow(progress, [2.0 * 0.9**k for k in range(10)], [0.0] * 10)
    level = math.log(4)
    assert [rate for rate, _ in follow(progress, [1.5, 1.5], [3.0, 4.0])] == pytest.approx([level + 0.1, level + 0.2])


def test_before_the_first_progress_the_rate_climbs_by_six_percent_a_step_and_above_a_limit_by_one():
    progress = Progress()
    progress.hold(-5.0, -3.8)
    verdicts = follow(progress, [2.0] * 12, [0.0] * 12)
    expected = [-5.0 + 0.6 * k for k in range(2)] + [-3.8 + 0.1 * k for k in range(10)]
    assert [rate for rate, _ in verdicts] == pytest.approx(expected)
    assert follow(progress, [1.9], [-2.0]) == [(-2.0, Standing.BETTER)]


def test_a_loss_that_differs_from_batch_to_batch_is_no_plateau_and_the_rate_may_climb_to_its_limit_at_once():
    progress = Progress()
    progress.hold(-5.0, -3.0)
    verdicts = follow(progress, [3.0, 3.5] * 6, [0.0] * 12)
    assert [rate for rate, _ in verdicts[9:]] == [-3.0] * 3


def test_noise_is_not_taken_for_the_end_of_a_plateau():
    torch.manual_seed(0)
    losses = (4.6 + 0.05 * torch.randn(320)).tolist()
    progress = Progress()
    progress.hold(-5.0, -3.0)
    follow(progress, losses, [0.0] * 320)
    assert not progress.has_begun


def test_a_plateau_has_ended_where_batches_that_have_become_noisy_are_better_on_average():
    """Small batches under BatchNorm: no single loss is far enough below the first one to be beyond doubt."""
    torch.manual_seed(0)
    noise = torch.randn(60).tolist()
    losses = [2.3 + 0.01 * noise[k] for k in range(10)] + [1.8 + 0.2 * noise[k] for k in range(10, 60)]
    assert min(losses) > 2.3 - 4 * 0.25
    progress = Progress()
    progress.hold(-5.0, -3.0)
    verdicts = follow(progress, losses, [-4.0] * 60)
    assert progress.has_begun and not where(verdicts, Standing.HELD_BACK)


@pytest.mark.parametrize(("noise", "enough"), [(0.2, 0.026), (0.01, 0.13)])
def test_a_network_has_begun_to_learn_if_it_is_better_than_at_first_on_the_same_batch(noise, enough):
    """The first batch was an easy one, so the average is not below it; on a plateau it takes more."""
    losses = [2.6] + [2.7 + noise * (-1) ** k for k in range(13)]  # no longer than patience lasts
    begun = {}
    for lower in (0.9 * enough, 1.1 * enough):
        progress = Progress()
        progress.hold(-5.0, -3.0)
        follow(progress, losses[:9], [-2.0] * 9, setback=-lower)
        assert not progress.has_begun
        follow(progress, losses[9:], [-2.0] * 5, setback=-lower)
        begun[lower] = progress.has_begun
    assert list(begun.values()) == [False, True]


@pytest.mark.parametrize(
    ("setback", "standing", "allowed"), [(-50.0, Standing.HELD_BACK, -math.log(10.0)), (-0.5, Standing.BETTER, 0.0)]
)
def test_a_loss_that_explodes_though_weights_have_become_far_better_is_moved_by_another_network(
    setback, standing, allowed
):
    progress = Progress()
    follow(progress, [0.6 * 0.9**k for k in range(12)], [0.0] * 12)
    assert follow(progress, [4.0], [0.0], setback=setback) == [(pytest.approx(allowed), standing)]


def test_in_a_short_run_the_rate_climbs_faster_on_a_plateau():
    allowed = {}
    for pace in (1.0, 2.0):
        progress = Progress()
        progress.hold(-5.0, -3.0)
        allowed[pace] = [progress.observe(Outcome(n, 2.0, 2.0, pace=pace), 0.0) for n in range(10)]
    assert allowed[1.0] == pytest.approx([-5.0 + 0.06 * n for n in range(10)])
    assert allowed[2.0] == pytest.approx([-5.0 + 0.12 * n for n in range(10)])


def test_a_loss_above_its_first_value_lowers_the_rate_to_a_tenth():
    progress = Progress()
    follow(progress, [2.0 * 0.9**k for k in range(10)], [0.0] * 10)
    verdicts = follow(progress, [2.5] * 60, [0.0] * 60)
    assert verdicts[where(verdicts, Standing.HELD_BACK)[0]][0] == pytest.approx(-math.log(10))
    assert not where(verdicts, Standing.LOST)


def test_a_network_at_its_first_loss_again_is_lost_and_continues_at_a_quarter_of_the_last_good_rate():
    progress = Progress()
    follow(progress, [2.3 * 0.9**k for k in range(10)], [-1.0] * 10)
    verdicts = follow(progress, [2.31] * 60, [0.0] * 60)
    lost = where(verdicts, Standing.LOST)
    assert lost[0] <= 25 and verdicts[lost[0]][0] == pytest.approx(-1.0 - math.log(4))


@pytest.mark.parametrize(("noise", "is_lost"), [(0.001, True), (0.3, False)], ids=["dead", "trained before"])
def test_a_loss_that_never_leaves_its_first_value_is_lost_unless_it_is_noisy(noise, is_lost):
    torch.manual_seed(0)
    losses = (2.3 + noise * torch.randn(100)).tolist()
    progress = Progress()
    progress.hold(-5.0, -3.8)
    assert bool(where(follow(progress, losses, [0.0] * 100), Standing.LOST)) == is_lost


def test_a_network_whose_parameters_lose_their_gradients_is_lost_at_once():
    progress = Progress()
    follow(progress, [2.3, 2.2, 2.0], [0.0] * 3, silent=0.2)
    verdicts = follow(progress, [2.3] * 5, [0.0] * 5, silent=0.9)
    assert where(verdicts, Standing.LOST) == [2]
    assert not where(follow(Progress(), [2.3] * 5, [0.0] * 5, silent=0.9), Standing.LOST)  # it was so from the first


def test_a_loss_that_is_not_finite_is_lost_and_after_three_times_no_more():
    progress = Progress()
    follow(progress, [2.3, 2.0], [0.0] * 2)
    found = [follow(progress, [math.nan], [0.0])[0][1] for _ in range(5)]
    assert found == [Standing.LOST] * 3 + [Standing.HELD_BACK] * 2


def test_a_loss_far_above_its_first_value_has_exploded():
    progress = Progress()
    follow(progress, [2.3, 9.0], [0.0] * 2)
    assert not progress.has_exploded and not Progress().has_exploded
    follow(progress, [9.5, 2.3], [0.0] * 2)
    assert progress.has_exploded


def test_it_continues_from_its_state():
    one, other = Progress(), Progress()
    follow(one, [2.0, 1.9, 1.8, 1.9], [0.0, 0.1, 0.2, 0.3])
    follow.counts[id(other)] = 4
    other.load_state_dict(one.state_dict())
    assert follow(one, [1.9] * 30, CLIMB[:30]) == follow(other, [1.9] * 30, CLIMB[:30])


def test_a_loss_that_leaps_to_several_times_its_first_value_is_lost_and_one_that_is_noisy_is_not():
    progress = Progress()
    follow(progress, [2.0 * 0.95**k for k in range(20)], [0.0] * 20)
    assert follow(progress, [9.0], [0.0]) == [(pytest.approx(-math.log(4)), Standing.LOST)]
    noisy = Progress()
    follow(noisy, [0.1, 3.0] * 20, [0.0] * 40)
    assert not where(follow(noisy, [9.0], [0.0]), Standing.LOST)


def test_a_network_that_cannot_go_back_is_not_said_to_have_done_so():
    progress = Progress()
    follow(progress, [2.0 * 0.95**k for k in range(20)] + [9.0], [0.0] * 21)
    assert "weights went back" in progress.sentences()[0]
    (sentence,) = progress.sentences(can_go_back=False)
    assert "No earlier weights are kept" in sentence and "went back" not in sentence


def test_gradients_that_vanish_because_all_is_learned_are_no_loss():
    progress = Progress()
    follow(progress, [2.0 * 0.8**k for k in range(20)], [0.0] * 20)
    assert not where(follow(progress, [0.0] * 60, [0.0] * 60, silent=1.0), Standing.LOST)


@pytest.mark.parametrize("loss", [2.31, 2.5, 20.0], ids=["at its first value", "above it", "a leap"])
@pytest.mark.parametrize(
    ("setback", "is_lost"), [(2.0, True), (0.0, False)], ids=["earlier weights are better", "they are no better"]
)
def test_a_loss_that_rises_because_the_data_have_changed_neither_goes_back_nor_lowers_the_rate(loss, setback, is_lost):
    setback *= loss / 2.5
    progress = Progress()
    follow(progress, [2.3 * 0.8**k for k in range(20)], [0.0] * 20, setback=0.0)
    verdicts = follow(progress, [loss] * 60, [0.0] * 60, setback=setback)
    punished = where(verdicts, Standing.LOST) + where(verdicts, Standing.HELD_BACK)
    assert bool(punished) == is_lost
    if not is_lost:
        assert {rate for rate, _ in verdicts} == {0.0}
        follow(progress, [loss * 0.9**k for k in range(20)], [0.0] * 20)
        assert progress.standing is Standing.BETTER  # the new loss is what has to fall


def test_a_loss_that_another_network_raises_lowers_the_rate():
    progress = Progress()
    follow(progress, [2.3 * 0.8**k for k in range(20)], [0.0] * 20)
    verdicts = follow(progress, [2.5] * 60, [0.0] * 60, setback=-10.0)
    assert where(verdicts, Standing.HELD_BACK) and not where(verdicts, Standing.LOST)


@pytest.mark.parametrize("noise", [0.001, 0.5], ids=["a large constant", "a first batch that was easy"])
def test_a_network_that_is_better_than_at_first_on_the_same_batch_has_begun_to_learn(noise):
    torch.manual_seed(0)
    first, losses = (2.3, [2.3] * 60) if noise < 0.01 else (0.1, (2.0 + noise * torch.randn(60)).tolist())
    progress = Progress()
    progress.hold(-5.0, -3.8)
    follow(progress, [first], [-5.0], setback=0.0)
    verdicts = follow(progress, losses, CLIMB, setback=-1.0)
    assert progress.has_begun and not where(verdicts, Standing.LOST)
    assert not progress.sentences()
