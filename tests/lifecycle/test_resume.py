from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
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


def through_the_optimizer(build, stop: int, end: int) -> tuple[Run, Run]:
    """Train without a break, and with a stop at which only the network's and the optimizer's state are saved."""
    whole, before, after = build().train(range(end)), build().train(range(stop)), build()
    checkpoint = saved_and_loaded({"model": before.model.state_dict(), "optimizer": before.optimizer.state_dict()})
    after.model.load_state_dict(checkpoint["model"])
    after.optimizer.load_state_dict(checkpoint["optimizer"])
    return whole, after.train(range(stop, end))


@pytest.mark.parametrize("stop", [4, 5, 6])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("door", DOORS)
def test_the_state_travels_inside_the_optimizers_own(door, rule, stop):
    assert_same_run(*through_the_optimizer(lambda: Run(door, rule, save_batch=True), stop, 11))


@pytest.mark.parametrize("stop", [4, 5])
@pytest.mark.parametrize("door", DOORS)
def test_without_the_batch_a_resume_is_exact_unless_the_next_step_is_a_meta_step(door, stop):
    assert_same_run(*through_the_optimizer(lambda: Run(door, "sgdm"), stop, 11))


def test_without_the_batch_a_resume_right_before_a_meta_step_looks_at_its_own_batch_once():
    whole, resumed = through_the_optimizer(lambda: Run("attached", "sgdm"), 6, 11)
    assert len(whole.tuner.history) == len(resumed.tuner.history)
    assert whole.tuner.history[2].objective != resumed.tuner.history[2].objective
    assert whole.lr == pytest.approx(resumed.lr, rel=0.2)


@pytest.mark.parametrize("door", DOORS)
def test_the_optimizers_file_holds_the_batch_only_where_it_is_asked_to(door):
    for save_batch in (False, True):
        run = Run(door, save_batch=save_batch).train(range(6))
        inside = saved_and_loaded(run.optimizer.state_dict())
        assert (inside["apo"]["fsd_batches"]["previous"] is not None) == save_batch
        assert "previous" not in inside["param_groups"][0]["apo"]["fsd_batches"]
        assert run.tuner.state_dict()["fsd_batches"]["previous"] is not None


def loaded_without_apo(run: Run, door: str, rule: str) -> Run:
    """Return a run whose optimizer loaded the file of another run before it was given to a tuner."""
    made = []

    def load(model):
        optimizer = RULES[rule](model)
        made.append(getattr(optimizer, "optimizer", optimizer))
        return optimizer

    plain = Run("attached", load)
    plain.tuner.detach()
    made[0].load_state_dict(saved_and_loaded(run.optimizer.state_dict()))
    plain.model.load_state_dict(run.model.state_dict())
    front, loss = (apo.APO, F.cross_entropy) if door == "explicit" else (apo.attach, plain.criterion)
    kind = type(plain.tuner.rule)
    options = {"per_group": True} if rule == "per group" else {}
    plain.tuner = front(kind(made[0], **options), plain.model, loss, interval=3)
    plain.door = door
    return plain


@pytest.mark.parametrize("rule", ["sgdm", "adam", "per group", "rate and momentum"])
@pytest.mark.parametrize("door", DOORS)
def test_attaching_after_a_file_was_loaded_continues_where_the_file_was(door, rule):
    whole, before = Run(door, rule).train(range(11)), Run(door, rule).train(range(5))
    after = loaded_without_apo(before, door, rule)
    assert after.tuner.steps == 5
    assert after.tuner.rule.rates() == before.tuner.rule.rates()
    after.train(range(5, 11))
    assert [record.step for record in after.tuner.history] == [6, 9]
    assert list(after.tuner.history) == list(whole.tuner.history)[2:]
    assert "apo" not in after.optimizer.param_groups[0]


@pytest.mark.parametrize("door", DOORS)
def test_attaching_after_a_file_was_loaded_is_not_exact_right_before_a_meta_step(door):
    # The batch of the step before lies beside the optimizer's own state; a plain optimizer drops it.
    whole, before = (Run(door, "sgdm", save_batch=True).train(range(end)) for end in (11, 6))
    late = loaded_without_apo(before, door, "sgdm").train(range(6, 11))
    assert [record.step for record in late.tuner.history] == [6, 9]
    assert late.tuner.history[0].objective != whole.tuner.history[2].objective
    assert whole.lr == pytest.approx(late.lr, rel=0.2)


def test_what_a_plain_optimizer_carried_along_is_not_used_once_its_rate_has_changed():
    before = Run("attached").train(range(5))
    optimizer = torch.optim.SGD(before.model.parameters(), lr=0.05, momentum=0.9)
    optimizer.load_state_dict(saved_and_loaded(before.optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.0123
    with pytest.warns(apo.ApoWarning, match=r"has taken steps before, so its rate 0.0123 is kept"):
        tuner = apo.attach(optimizer, before.model, before.criterion)
    assert tuner.steps == 0 and tuner.rule.rates() == pytest.approx((0.0123,))


def plain_file(lr: float) -> dict:
    run = Run("attached", lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
    run.tuner.detach()
    run.train(range(3))
    return saved_and_loaded(run.optimizer.state_dict())


def test_no_warm_start_overwrites_a_rate_that_was_loaded():
    run = Run("attached")
    run.optimizer.load_state_dict(plain_file(1.23e-4))
    run.train(range(1))
    assert run.lr == pytest.approx(1.23e-4, rel=0.25)  # one meta-step moves it by a fifth at most
    assert Run("attached").train(range(1)).lr > 1e-3


def test_no_warm_start_overwrites_a_rate_that_was_loaded_before_attaching():
    torch.manual_seed(0)
    model = network_with_dropout_and_batchnorm()
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    other = torch.optim.Adam(model.parameters(), lr=1.23e-6)
    criterion(model(batch(0)[0]), batch(0)[1]).backward()
    other.step()
    optimizer.load_state_dict(saved_and_loaded(other.state_dict()))
    with pytest.warns(apo.ApoWarning, match=r"has taken steps before, so its rate 1.23e-06 is kept"):
        apo.attach(optimizer, model, criterion)
    optimizer.zero_grad()
    criterion(model(batch(1)[0]), batch(1)[1]).backward()
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.23e-6, rel=0.25)


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
    assert after.tuner.steps == 3 and after.tuner.begun  # no second warm start
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


@pytest.mark.parametrize("stop", [5, 6])
def test_a_step_with_several_losses_resumes_bit_for_bit_with_all_of_them(stop):
    def build():
        return Run("attached", "sgdm", save_batch=True)

    def train(run, steps):
        for index in steps:
            (x, y), (z, t) = run.batch(index), run.batch(100 + index)
            run.optimizer.zero_grad()
            (run.criterion(run.model(x), y) + 0.3 * run.criterion(run.model(z), t)).backward()
            run.optimizer.step()
        return run

    whole, before, after = train(build(), range(11)), train(build(), range(stop)), build()
    checkpoint = saved_and_loaded({"model": before.model.state_dict(), "optimizer": before.optimizer.state_dict()})
    after.model.load_state_dict(checkpoint["model"])
    after.optimizer.load_state_dict(checkpoint["optimizer"])
    assert len(after.tuner.fsd_batches.state_dict()["previous"]) == 2
    assert_same_run(whole, train(after, range(stop, 11)))
