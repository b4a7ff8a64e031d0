from __future__ import annotations

import pytest
import torch
from tests.lifecycle.harness import (
    DOORS,
    RULES,
    Loader,
    Run,
    StatefulLoader,
    assert_same_run,
    batch,
    network_with_dropout_and_batchnorm,
    saved_and_loaded,
)
from torch.optim import lr_scheduler

import apo

SCHEDULERS = {
    "recursive": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.83),
    "closed form": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.StepLR(optimizer, 2)], [4]
    ),
}


def interrupted(build, stop: int, end: int, make_scheduler=None) -> tuple[Run, Run]:
    """Train without a break, and with a stop after which everything is built again from a checkpoint."""
    whole = build()
    scheduler = make_scheduler and make_scheduler(whole.optimizer)
    torch.manual_seed(1)
    whole.train(range(end), scheduler)

    before = build()
    scheduler = make_scheduler and make_scheduler(before.optimizer)
    torch.manual_seed(1)
    before.train(range(stop), scheduler)
    checkpoint = {"model": before.model.state_dict(), "tuner": before.tuner.state_dict()}
    checkpoint["scheduler"] = scheduler and scheduler.state_dict()
    checkpoint = saved_and_loaded(checkpoint)

    torch.manual_seed(12345)
    after = build()
    scheduler = make_scheduler and make_scheduler(after.optimizer)
    after.model.load_state_dict(checkpoint["model"])
    after.tuner.load_state_dict(checkpoint["tuner"])
    if scheduler:
        scheduler.load_state_dict(checkpoint["scheduler"])
    assert after.tuner.rule.rates() == before.tuner.rule.rates()
    return whole, after.train(range(stop, end), scheduler)


@pytest.mark.parametrize("stop", [1, 4, 6])  # after, two before and on the eve of a meta-step (interval 3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("door", DOORS)
def test_every_rule_resumes_bit_for_bit(door, rule, stop):
    whole, resumed = interrupted(lambda: Run(door, rule, network_with_dropout_and_batchnorm), stop, 11)
    assert_same_run(whole, resumed)
    assert resumed.tuner.steps == 11


def test_the_warming_up_rule_was_stopped_in_the_middle_of_its_warm_up():
    run = Run("explicit", "kronecker warming up").train(range(6))
    assert run.optimizer.warming_up
    assert len(run.tuner.history) == 6
    run.train(range(6, 14))
    assert not run.optimizer.warming_up


@pytest.mark.parametrize("source", ["same", "list", "loader", "stateful"])
@pytest.mark.parametrize("stop", [1, 7, 13])
@pytest.mark.parametrize("door", DOORS)
def test_the_batches_of_the_function_space_term_go_on_where_they_were(door, source, stop):
    make = {
        "same": lambda: "same",
        "list": lambda: [batch(500), batch(501)],
        "loader": Loader,
        "stateful": StatefulLoader,
    }

    def build() -> Run:
        return Run(door, "sgdm", network_with_dropout_and_batchnorm, fsd_batch=make[source]())

    if source == "loader":
        with pytest.warns(apo.ApoWarning, match="wound forward"):
            whole, resumed = interrupted(build, stop, 20)
    else:
        whole, resumed = interrupted(build, stop, 20)
    assert_same_run(whole, resumed)


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("rule", ["sgdm", "per group", "kronecker", "rate and momentum"])
@pytest.mark.parametrize("door", DOORS)
def test_resumes_bit_for_bit_with_a_scheduler(door, rule, schedule):
    whole, resumed = interrupted(lambda: Run(door, rule), 5, 12, SCHEDULERS[schedule])
    assert_same_run(whole, resumed)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("door", DOORS)
def test_the_state_travels_inside_the_optimizers_own(door, rule):
    whole = Run(door, rule).train(range(11))
    before = Run(door, rule).train(range(5))
    checkpoint = saved_and_loaded({"model": before.model.state_dict(), "optimizer": before.optimizer.state_dict()})
    after = Run(door, rule)
    after.model.load_state_dict(checkpoint["model"])
    after.optimizer.load_state_dict(checkpoint["optimizer"])
    assert_same_run(whole, after.train(range(5, 11)))


@pytest.mark.parametrize("rule", ["sgdm", "adam", "per group", "rate and momentum"])
def test_a_checkpoint_from_before_apo_is_taken_up_at_its_rate(rule):
    run = Run("attached", rule)
    state = saved_and_loaded(run.optimizer.state_dict())
    del state["apo"]
    for group in state["param_groups"]:
        group["lr"] = 0.0123
        group.pop("initial_lr", None)
    run.optimizer.load_state_dict(state)
    assert run.tuner.rule.rates() == pytest.approx([0.0123] * len(state["param_groups"]))
    run.train(range(1, 5))
    assert len(run.tuner.history) == 2


def test_a_checkpoint_in_the_middle_of_a_plain_schedule_keeps_its_factor_apart():
    plain = Run("attached")
    plain.tuner.detach()
    lr_scheduler.LambdaLR(plain.optimizer, lambda step: 0.5)
    run = Run("attached")
    lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.5)
    run.optimizer.load_state_dict(saved_and_loaded(plain.optimizer.state_dict()))
    assert run.tuner.rule.learned_rates() == pytest.approx([0.05])
    assert run.lr == pytest.approx(0.025)


def test_counters_and_skipped_updates_come_back():
    run = Run("explicit").train(range(4))
    run.tuner.skipped_meta_updates = 2
    other = Run("explicit")
    other.tuner.load_state_dict(saved_and_loaded(run.tuner.state_dict()))
    assert (other.tuner.steps, other.tuner.skipped_meta_updates, len(other.tuner.history)) == (4, 2, 2)


def test_a_state_of_the_first_release_which_did_not_say_whether_training_had_begun_is_read():
    before = Run("explicit", "sgdm")
    before.train(range(3))
    state = before.tuner.state_dict()
    del state["begun"]
    after = Run("explicit", "sgdm")
    after.tuner.load_state_dict(state)
    assert after.tuner.steps == 3 and after.tuner._begun  # no second warm start
    assert after.tuner.rule.rates() == before.tuner.rule.rates()


def test_the_random_stream_is_restored_unless_declined():
    run = Run("explicit").train(range(2))
    state = saved_and_loaded(run.tuner.state_dict())
    expected = torch.rand(3)
    torch.manual_seed(99)
    run.tuner.load_state_dict(state, restore_random=False)
    assert not torch.equal(torch.rand(3), expected)
    run.tuner.load_state_dict(state)
    assert torch.equal(torch.rand(3), expected)


def test_loading_leaves_the_checkpoint_as_it_was():
    run = Run("attached").train(range(2))
    state = saved_and_loaded(run.tuner.state_dict())
    keys = set(state), set(state["optimizer"])
    run.tuner.load_state_dict(state)
    run.optimizer.load_state_dict(state["optimizer"] | {"apo": state})
    assert (set(state), set(state["optimizer"])) == keys
