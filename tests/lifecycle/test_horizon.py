"""``total_steps``: what knowing the end of training changes, through both front doors."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.lifecycle.harness import (
    DOORS,
    Run,
    assert_equal_bits,
    assert_same_run,
    batch,
    network_with_dropout_and_batchnorm,
    saved_and_loaded,
)

import apo


def run(door: str, total_steps: int | None, rule: str = "sgdm", **options) -> Run:
    built = Run(door, rule, network_with_dropout_and_batchnorm, total_steps=total_steps, **options)
    torch.manual_seed(1)
    return built


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_share_waits_for_half_of_the_steps_and_then_rises_to_one(share):
    objective = apo.ProximalObjective(0.0, 0.0, other_batch_share=share, total_steps=200)
    shares = [objective.share(step) for step in range(0, 251, 10)]
    assert shares[:11] == [share] * 11
    assert shares[10:21] == sorted(shares[10:21]) and len(set(shares[10:21])) == 11
    assert shares[15] == pytest.approx((1 + share) / 2)
    assert shares[20:] == [1.0] * 6


@pytest.mark.parametrize("door", DOORS)
def test_the_first_half_is_that_of_a_run_whose_end_nobody_knows(door, monkeypatch):
    monkeypatch.setattr(apo.ProximalObjective, "pace", 1.0)  # as if it were not short
    known, unknown = run(door, 22).train(range(11)), run(door, None).train(range(11))
    assert_same_run(unknown, known)
    known.train(range(11, 20))
    unknown.train(range(11, 20))
    assert known.tuner.history[-1].lr != unknown.tuner.history[-1].lr


def test_the_pace_of_a_run_grows_with_the_root_of_its_shortness():
    def pace(total_steps):
        return apo.ProximalObjective(0.0, 0.0, total_steps=total_steps).pace

    assert [pace(steps) for steps in (None, 80_000, 500)] == [1.0, 1.0, 1.0]
    assert [pace(steps) for steps in (125, 20, 2)] == pytest.approx([2.0, 5.0, 5.0])


@pytest.mark.parametrize("door", DOORS)
def test_in_a_short_run_the_rate_rises_sooner(door):
    usual, short = (run(door, steps, interval="auto").train(range(10)) for steps in (500, 80))
    learned = [tuned.tuner.rule.learned_rates()[0] for tuned in (usual, short)]
    assert learned[1] > 1.5 * learned[0]


def test_the_factor_of_a_learned_rate_falls_linearly_over_the_second_half():
    objective = apo.ProximalObjective(0.0, 0.0, total_steps=200)
    assert [objective.fade(step) for step in (0, 100, 150, 190)] == pytest.approx([1.0, 1.0, 0.5, 0.1])
    assert objective.fade(200) == objective.fade(300) == 0.01  # training that continues does not stand still
    assert apo.ProximalObjective(0.0, 0.0).fade(500) == 1.0


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("rule", ["sgdm", "adam", "per group"])
def test_the_rate_in_force_is_the_learned_one_times_the_factor(door, rule):
    tuned = run(door, 20, rule).train(range(19))
    learned = tuned.tuner.rule.learned_rates()
    assert tuned.tuner.rule.rates() == pytest.approx([rate * 0.2 for rate in learned])
    assert [group["lr"] for group in tuned.optimizer.param_groups] == pytest.approx([rate * 0.2 for rate in learned])


def test_a_scheduler_takes_the_place_of_the_factor():
    tuned = run("attached", 20)
    scheduler = torch.optim.lr_scheduler.LambdaLR(tuned.optimizer, lambda step: 0.5)
    for step in range(19):
        tuned.train(range(step, step + 1))
        scheduler.step()
    assert tuned.lr == pytest.approx(0.5 * tuned.tuner.rule.learned_rates()[0])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("rule", ["sgdm", "adam", "kronecker"])
def test_at_every_step_the_objective_is_that_of_the_share_at_this_step(door, rule, monkeypatch):
    monkeypatch.setattr(apo.ProximalObjective, "pace", 1.0)
    rising = run(door, 12, rule, interval=1).train(range(12))
    by_hand = run(door, None, rule, interval=1)
    compares = rising.tuner.rule.compares  # then the share does not rise
    for step in range(12):
        by_hand.tuner.objective.other_batch_share = rising.tuner.objective.share(step, compares=compares)
        by_hand.tuner.objective.fade = rising.tuner.objective.fade  # type: ignore[method-assign]
        by_hand.train(range(step, step + 1))
    usual = run(door, None, rule).tuner.objective.other_batch_share
    last = usual if compares else usual + (1 - usual) * (2 * 11 / 12 - 1)
    assert by_hand.tuner.objective.other_batch_share == pytest.approx(last)
    assert_same_run(by_hand, rising)


@pytest.mark.parametrize("stop", [5, 9, 14])
@pytest.mark.parametrize("door", DOORS)
def test_it_resumes_bit_for_bit_before_and_after_the_rise_began(door, stop):
    whole, before = run(door, 16).train(range(16)), run(door, 16).train(range(stop))
    checkpoint = saved_and_loaded({"model": before.model.state_dict(), "tuner": before.tuner.state_dict()})
    after = run(door, 16)
    after.model.load_state_dict(checkpoint["model"])
    after.tuner.load_state_dict(checkpoint["tuner"])
    assert_same_run(whole, after.train(range(stop, 16)))


def test_a_run_that_outlives_its_end_says_so_once():
    with warnings.catch_warnings():
        warnings.simplefilter("error", apo.ApoWarning)
        tuned = run("explicit", 7).train(range(7))  # the last meta-step is the one of step 6
    with pytest.warns(apo.ApoWarning, match="continues after total_steps=7, .*: pass the number of steps") as caught:
        tuned.train(range(7, 20))
    assert len(caught) == 1


@pytest.mark.parametrize("door", DOORS)
def test_batches_without_targets_are_refused_at_once_and_not_in_the_middle_of_training(door):
    tuned = run(door, 100, fsd_batch=[batch(0)[0]])
    before = [p.detach().clone() for p in tuned.model.parameters()]
    with pytest.raises(apo.MissingBatchError, match=r"no targets: let fsd_batch yield \(inputs, target\) pairs"):
        tuned.train(range(1))
    assert_equal_bits(before, tuned.model.parameters())


@pytest.mark.parametrize("wrong", [0, -3, 2.5, "many", True])
def test_a_wrong_number_of_steps_is_refused(wrong):
    with pytest.raises(ValueError, match=f"total_steps must be a whole number of at least 1, got {wrong!r}: the batch"):
        run("explicit", wrong)


def test_without_a_batch_beside_the_steps_own_it_is_refused():
    with pytest.raises(ValueError, match="total_steps=9 needs a batch beside the step's own: drop fsd_batch='same'"):
        run("explicit", 9, fsd_batch="same")
