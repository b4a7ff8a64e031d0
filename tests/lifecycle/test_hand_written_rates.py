"""Rates that a training loop writes itself: now and then, in every epoch, in every iteration, with schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.lifecycle.harness import DOORS, Run, assert_same_run, saved_and_loaded, two_groups
from torch.optim import SGD, lr_scheduler
from torch.optim.swa_utils import SWALR

import apo

SENTENCE = r"multiple of the initial rate"


def built(door: str, lr: float, **options) -> Run:
    return Run(door, lambda model: SGD(model.parameters(), lr=lr, momentum=0.9), **options)


def cosine(step: int, length: int = 12) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / length))


def learned(run: Run) -> float:
    return run.tuner.rule.learned_rates()[0]


def train(run: Run, steps: range, write: Callable[[int], None]) -> None:
    for step in steps:
        write(step)
        run.step(*run.batch(step))


def writing(run: Run, lr: float) -> Callable[[int], None]:
    def write(step: int) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = lr * cosine(step)

    return write


@pytest.mark.parametrize("lr", [1e-5, 0.05, 10.0])
@pytest.mark.parametrize("door", DOORS)
def test_a_rate_written_in_every_iteration_multiplies_the_learned_one_from_the_first_step_on(door, lr):
    # A constant over-relaxation learns more in these few steps than the default does.
    run = Run(door, lambda model: apo.LearningRate(SGD(model.parameters(), lr=lr, momentum=0.9), over_relaxation=1.4))
    write = writing(run, lr)
    write(0)
    run.step(*run.batch(0))
    with pytest.warns(apo.ApoWarning, match=SENTENCE) as said:
        write(1)
    assert len(said) == 1
    for step in range(1, 12):
        write(step)
        assert run.lr == pytest.approx(learned(run) * cosine(step), rel=1e-9)
        run.step(*run.batch(step))
    assert learned(run) != pytest.approx(lr, rel=0.1)
    assert run.tuner.history[-1].lr == pytest.approx([learned(run) * cosine(9)])


def test_groups_keep_their_ratios_and_one_sentence_is_said_for_all():
    run = Run("attached", lambda model: SGD(two_groups(model), lr=0.1, momentum=0.9))

    def write(step: int) -> None:
        for group, initial in zip(run.optimizer.param_groups, (0.02, 0.1), strict=True):
            group["lr"] = initial * cosine(step)

    with pytest.warns(apo.ApoWarning, match=SENTENCE) as said:
        train(run, range(12), write)
    assert len(said) == 1
    expected = [rate * cosine(11) for rate in run.tuner.rule.learned_rates()]
    assert run.tuner.rule.rates() == pytest.approx(expected)


@pytest.mark.parametrize(("built_with", "peak"), [(1e-3, 0.1), (10.0, 6e-4)])
def test_a_schedule_whose_peak_is_not_the_optimizers_rate_is_told_plainly_what_to_do(built_with, peak):
    run = built("attached", built_with)
    plainly = rf"built with lr={built_with:g}, but the training loop writes .*: build the optimizer with the schedule's"
    with pytest.warns(apo.ApoWarning, match=plainly) as said:
        train(run, range(4), writing(run, peak))
    assert len(said) == 1 and f"{peak * cosine(1) / built_with:g} times" in str(said[0].message)


def test_a_warm_up_from_far_below_the_peak_is_told_the_rule_and_what_to_do():
    run = built("attached", 0.1)

    def write(step: int) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = 0.1 * (step + 1) / 100

    with pytest.warns(apo.ApoWarning, match=SENTENCE + r" 0.1, as.*so build the optimizer with the schedule's peak$"):
        train(run, range(4), write)


def test_a_rate_and_momentum_rule_reads_it_alike():
    run = Run("attached", "rate and momentum")
    with pytest.warns(apo.ApoWarning, match=SENTENCE):
        train(run, range(8), writing(run, 0.05))
    assert run.lr == pytest.approx(math.exp(float(run.tuner.rule.phi()[0])) * cosine(7))


def test_a_schedule_that_begins_in_the_middle_is_recognised_in_its_third_iteration():
    run = built("attached", 1e-5).train(range(4))
    write = writing(run, 1e-5)
    train(run, range(4, 6), write)
    assert run.lr == pytest.approx(1e-5 * cosine(5))  # until then a rate written by hand is the rate in force
    with pytest.warns(apo.ApoWarning, match=SENTENCE):
        train(run, range(6, 9), write)
    assert run.lr == pytest.approx(learned(run) * cosine(8))


def test_a_rate_written_in_every_epoch_from_the_first_is_a_schedule():
    run = built("attached", 1e-5)

    def write(step: int) -> None:  # as in PyTorch's example for ImageNet
        if step % 4 == 0:
            for group in run.optimizer.param_groups:
                group["lr"] = 1e-5 * 0.1 ** (step // 4)

    with pytest.warns(apo.ApoWarning, match=SENTENCE):
        train(run, range(12), write)
    assert run.lr == pytest.approx(learned(run) * 0.01)


def test_reading_the_rate_for_a_log_changes_nothing():
    run, seen = built("attached", 1e-5), []

    def write(step: int) -> None:
        seen.append(run.optimizer.param_groups[0]["lr"])
        run.optimizer.param_groups[0]["lr"] = 1e-5 * cosine(step)
        seen.append(run.optimizer.param_groups[0]["lr"])

    with pytest.warns(apo.ApoWarning, match=SENTENCE):
        train(run, range(10), write)
    assert run.lr == pytest.approx(learned(run) * cosine(9))
    assert {type(rate) for rate in seen} == {float}


def multiply(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.99


def multiply_in_two_lines(run: Run) -> None:
    group = run.optimizer.param_groups[0]
    rate = group["lr"]
    group["lr"] = 0.99 * rate


def multiply_what_a_function_returns(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = run.lr * 0.99


@pytest.mark.parametrize("lr", [1e-5, 10.0])
@pytest.mark.parametrize("decay", [multiply, multiply_in_two_lines, multiply_what_a_function_returns])
def test_a_rate_that_is_multiplied_in_every_iteration_is_not_read_as_a_multiple_of_the_initial_one(decay, lr):
    run = built("attached", lr)
    run.step(*run.batch(0))
    train(run, range(1, 13), lambda step: decay(run))
    assert run.lr == pytest.approx(learned(run) * 0.99**12, rel=1e-9)


def test_a_schedule_by_hand_may_be_multiplied_once():
    run = built("attached", 1e-5)
    write = writing(run, 1e-5)
    with pytest.warns(apo.ApoWarning, match=SENTENCE):
        train(run, range(4), write)
    run.optimizer.param_groups[0]["lr"] *= 0.1
    assert run.lr == pytest.approx(0.1 * learned(run) * cosine(3))


@pytest.mark.parametrize("stop", [1, 4, 6])
@pytest.mark.parametrize("door", DOORS)
def test_a_schedule_by_hand_is_resumed_bit_for_bit(door, stop):
    whole, before, after = (built(door, 10.0) for _ in range(3))
    for run, steps in ((whole, range(11)), (before, range(max(stop, 2)))):
        with pytest.warns(apo.ApoWarning, match=SENTENCE):
            train(run, steps, writing(run, 10.0))
    stop = max(stop, 2)  # in the second iteration it is a schedule
    after.model.load_state_dict(saved_and_loaded(before.model.state_dict()))
    after.tuner.load_state_dict(saved_and_loaded(before.tuner.state_dict()))
    train(after, range(stop, 11), writing(after, 10.0))
    assert_same_run(whole, after)


def test_a_warm_up_by_hand_before_a_scheduler_takes_over():
    run = built("attached", 1e-5)
    scheduler = lr_scheduler.LambdaLR(run.optimizer, lambda epoch: 0.5**epoch)
    for step in range(12):
        if step < 4:  # as in YOLOv5
            for group in run.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (step + 1) / 5
            assert run.lr == pytest.approx(learned(run) * (step + 1) / 5)
        run.step(*run.batch(step))
        if step % 4 == 3:
            scheduler.step()
    assert run.lr == pytest.approx(learned(run) * 0.125)


class StepsInItsOwnWay(lr_scheduler.LRScheduler):
    """A scheduler that multiplies the rate in ``step``, as some that were written at home do."""

    def get_lr(self) -> list[float]:
        return [group["initial_lr"] for group in self.optimizer.param_groups]

    def step(self, epoch=None) -> None:
        self.last_epoch += 1
        for group in self.optimizer.param_groups:
            if self.last_epoch:
                group["lr"] = group["lr"] * 0.9


def test_a_scheduler_with_a_step_of_its_own_multiplies_the_rate():
    run = built("attached", 1e-5)
    scheduler = StepsInItsOwnWay(run.optimizer)
    run.train(range(7), scheduler)
    assert run.lr == pytest.approx(learned(run) * 0.9**7)


class FromElsewhere:
    """A scheduler that is not torch's, as timm's are not: it asks for the initial rate and writes a closed form."""

    def __init__(self, optimizer) -> None:
        self.optimizer, self.epoch = optimizer, 0
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def step(self) -> None:
        self.epoch += 1
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * cosine(self.epoch)


def test_a_scheduler_that_is_not_torchs_multiplies_the_learned_rate():
    run = built("attached", 1e-5).train(range(1))
    scheduler = FromElsewhere(run.optimizer)
    for step in range(1, 8):
        run.step(*run.batch(step))
        scheduler.step()
        assert run.lr == pytest.approx(learned(run) * cosine(step))


@pytest.mark.parametrize("lr", [1e-5, 0.02, 10.0])
def test_swalr_goes_to_its_own_rate_and_says_so_once(lr):
    run = built("attached", lr)
    scheduler = SWALR(run.optimizer, swa_lr=0.05, anneal_epochs=4)
    with pytest.warns(apo.ApoWarning, match=r"SWALR sets a rate of its own.*swa_lr=0.05") as said:
        run.train(range(6), scheduler)
    assert len([warning for warning in said if issubclass(warning.category, apo.ApoWarning)]) == 1
    assert run.lr == pytest.approx(0.05)


@pytest.mark.parametrize("lr", [1e-5, 0.02, 10.0])
def test_reduce_on_plateau_beside_another_scheduler_multiplies_the_learned_rate(lr):
    run = built("attached", lr)
    warm_up = lr_scheduler.LinearLR(run.optimizer, 0.1, total_iters=3)
    plateau = lr_scheduler.ReduceLROnPlateau(run.optimizer, factor=0.3, patience=0, eps=0.0)
    run.train(range(4), warm_up)
    for reductions in range(3):
        assert run.lr == pytest.approx(learned(run) * 0.3**reductions)
        plateau.step(1.0 + reductions)
        plateau.step(2.0 + reductions) if not reductions else None
    assert [type(rate) for rate in plateau.get_last_lr()] == [float]


@pytest.mark.parametrize("before", [False, True], ids=["built after", "built before"])
@pytest.mark.parametrize("lr", [1e-3, 1e-5, 0.1])
def test_the_top_of_a_cycle_is_the_learned_rate_wherever_the_cycle_begins(lr, before):
    made = []

    def rule(model):
        optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
        if before:
            made.append(lr_scheduler.CyclicLR(optimizer, 1e-3, 0.1, step_size_up=4, cycle_momentum=False))
        return optimizer

    run = Run("attached", rule)
    scheduler = made[0] if before else lr_scheduler.CyclicLR(run.optimizer, 1e-3, 0.1, 4, cycle_momentum=False)
    for step, factor in enumerate((0.2575, 0.505, 0.7525, 1.0, 0.7525, 0.505)):
        run.step(*run.batch(step))
        scheduler.step()
        assert run.lr == pytest.approx(learned(run) * factor)


def test_a_rate_that_a_tensor_holds_stays_one():
    run = Run("attached", lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3)))
    run.train(range(4))
    assert isinstance(run.optimizer.param_groups[0]["lr"], torch.Tensor)
