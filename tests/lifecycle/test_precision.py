from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from tests.lifecycle.harness import CLASSES, DOORS, FEATURES, Run, assert_equal_bits, assert_same_run, plain_network
from torch import Tensor, nn
from torch.optim import SGD, Adam

import apo


class Log(list):
    """A list that a meta-step does not put back, unlike the attributes that a network keeps its state in."""


class Watched(nn.Module):
    """A linear layer that notes the precision of each of its passes and the weights it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.passes: list[tuple[torch.dtype, Tensor]] = Log()

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.linear(inputs)
        self.passes.append((output.dtype, self.linear.weight.detach().clone()))
        return output


def paper_sgd(model: nn.Module) -> apo.LearningRate:
    return apo.LearningRate.paper(SGD(model.parameters(), lr=0.5))


def train_step(run: Run, index: int, region: str) -> None:
    """Take a step with autocast around the forward pass, as one should, or around everything."""
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    inputs, target = run.batch(index)
    with autocast if region == "everything" else contextlib.nullcontext():
        run.optimizer.zero_grad()
        with autocast if region == "forward" else contextlib.nullcontext():
            if run.door == "explicit":
                run.backward(inputs, target)
            else:
                loss = run.criterion(run.model(inputs), target)
        if run.door == "attached":
            loss.backward()
        run.update()


@pytest.mark.parametrize("region", ["forward", "everything"])
@pytest.mark.parametrize("door", DOORS)
def test_the_look_ahead_runs_in_the_precision_of_the_training_pass_and_at_its_own_weights(door, region):
    run = Run(door, paper_sgd, Watched, interval=1, fsd_weight=0)
    theta = run.model.linear.weight.detach().clone()
    train_step(run, 0, region)
    (first, at_theta), (second, ahead), (third, again) = run.model.passes  # the last compares gradients
    assert first == second == third == torch.bfloat16
    assert torch.equal(at_theta, theta) and torch.equal(again, theta)
    assert not torch.equal(ahead, theta)
    record = run.tuner.history[0]
    # With autocast's cache of 16-bit weights both losses would be the one at theta.
    assert record.look_ahead_loss < record.loss - 0.01


@pytest.mark.parametrize("region", ["forward", "everything"])
@pytest.mark.parametrize("door", DOORS)
def test_the_recorded_look_ahead_loss_is_that_of_the_look_ahead_weights_under_autocast(door, region):
    run = Run(door, paper_sgd, plain_network, interval=1, fsd_weight=0)
    twin = plain_network()
    twin.load_state_dict(run.model.state_dict())
    inputs, target = run.batch(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(twin(inputs), target)
    loss.backward()
    with torch.no_grad():
        for p in twin.parameters():
            p.sub_(0.5 * p.grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.cross_entropy(twin(inputs), target)
    train_step(run, 0, region)
    assert run.tuner.history[0].loss == pytest.approx(loss.item(), rel=1e-6)
    assert run.tuner.history[0].look_ahead_loss == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("rule", ["sgdm", "adam", "kronecker"])
@pytest.mark.parametrize("region", ["forward", "everything"])
def test_both_doors_agree_under_autocast(rule, region):
    runs = [Run(door, rule) for door in DOORS]
    for index in range(7):
        for run in runs:
            train_step(run, index, region)
    assert_same_run(*runs)
    assert len(runs[0].tuner.history) == 3


def test_autocast_is_as_it_was_after_a_meta_step():
    run = Run("attached", interval=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run.step(*run.batch(0))
        assert torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
        assert run.model(run.batch(0)[0]).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("rule", ["sgdm", "adam", "per group", "kronecker", "diagonal", "rate and momentum"])
@pytest.mark.parametrize("door", DOORS)
def test_pure_bfloat16_weights_train(door, rule):
    run = Run(door, rule, dtype=torch.bfloat16).train(range(31))
    history = run.tuner.history
    assert all(p.dtype == torch.bfloat16 for p in run.model.parameters())
    assert history[-1].loss < 0.9 * history[0].loss
    assert all(record.updated for record in history)


def test_pure_bfloat16_weights_find_the_rate_of_float32():
    def rule(model: nn.Module) -> apo.LearningRate:
        return apo.LearningRate(SGD(model.parameters(), lr=1e-4))

    narrow, wide = Run("explicit", rule, dtype=torch.bfloat16), Run("explicit", rule)
    for run in (narrow, wide):
        run.train(range(10))
    assert narrow.lr == pytest.approx(wide.lr, rel=0.5)


# --- GradScaler ---

#: apo.APO scales the loss itself; an attached tuner need not be told of the scaler.
SCALED_DOORS = [("explicit", True), ("attached", True), ("attached", False)]


def scaled_step(run: Run, index: int, scaler: torch.amp.GradScaler, overflow: bool = False) -> None:
    inputs, target = run.batch(index)
    if overflow:
        inputs = inputs * 1e38
    if isinstance(run.tuner, apo.APO):
        run.tuner.step(inputs, target)
        return
    run.optimizer.zero_grad()
    scaler.scale(run.criterion(run.model(inputs), target)).backward()
    scaler.step(run.optimizer)
    scaler.update()


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)


RULES = {
    "sgd": lambda model: apo.LearningRate(SGD(model.parameters(), lr=0.1, momentum=0.9)),
    "adam": lambda model: apo.LearningRate(Adam(model.parameters(), lr=0.01)),
    "fused sgd": lambda model: apo.LearningRate(SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)),
    "fused adam": lambda model: apo.LearningRate(Adam(model.parameters(), lr=0.01, fused=True)),
    "kronecker": lambda model: apo.Kronecker(model, lr=0.1),
}


@pytest.mark.parametrize("door, told", SCALED_DOORS)
@pytest.mark.parametrize("rule", RULES)
def test_a_loss_scale_changes_nothing(door, rule, told):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaled = Run(door, RULES[rule], Linear, scaler=scaler if told else None)
    plain = Run(door, RULES[rule], Linear)
    for index in range(7):
        scaled_step(scaled, index, scaler)
        plain.step(*plain.batch(index))
    assert_equal_bits(scaled.weights(), plain.weights())  # a power of two scales without rounding
    assert list(scaled.tuner.history) == list(plain.tuner.history)


@pytest.mark.parametrize("door, told", SCALED_DOORS)
@pytest.mark.parametrize("rule", ["sgd", "adam", "kronecker"])
def test_an_overflow_leaves_out_step_and_meta_step_and_forgets_the_batch(door, rule, told):
    runs, scalers = [], []
    for overflows in ((), (0, 3)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        run = Run(door, RULES[rule], Linear, fsd_batch="same", scaler=scaler if told else None)
        for index in range(5):
            if index in overflows:
                before = run.weights()
                scaled_step(run, index, scaler, overflow=True)
                assert_equal_bits(before, run.weights())
            scaled_step(run, index, scaler)
        runs.append(run)
        scalers.append(scaler.get_scale())
    assert scalers[1] == scalers[0] / 4
    assert runs[1].tuner.steps == 5
    assert_same_run(*runs)


@pytest.mark.parametrize(
    "rule, overflow_at",
    # Not fused SGD on its first step: torch then leaves its momentum uninitialised, with apo or without.
    [("fused sgd", 3), ("fused adam", 0), ("fused adam", 3)],
)
@pytest.mark.parametrize("door", DOORS)
def test_an_overflow_that_a_fused_optimizer_finds_leaves_out_step_and_meta_step(door, rule, overflow_at):
    runs = []
    for overflows in ((), (overflow_at,)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        run = Run(door, RULES[rule], Linear, fsd_batch="same", scaler=scaler)
        for index in range(5):
            if index in overflows:
                before, seen = run.weights(), len(run.tuner.history)
                scaled_step(run, index, scaler, overflow=True)
                assert_equal_bits(before, run.weights())
                assert len(run.tuner.history) == seen
                assert scaler.get_scale() == 128.0
            scaled_step(run, index, scaler)
        runs.append(run)
    assert_same_run(*runs)


def test_gradients_may_be_unscaled_and_clipped():
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaled, plain = Run("attached", "sgdm"), Run("attached", "sgdm")
    for index in range(4):
        for run in (scaled, plain):
            inputs, target = run.batch(index)
            run.optimizer.zero_grad()
            loss = run.criterion(run.model(inputs), target)
            (scaler.scale(loss) if run is scaled else loss).backward()
            if run is scaled:
                scaler.unscale_(run.optimizer)
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
            if run is scaled:
                scaler.step(run.optimizer)
                scaler.update()
            else:
                run.optimizer.step()
    assert_same_run(scaled, plain)


def test_float16_autocast_with_a_scaler_trains():
    scaler = torch.amp.GradScaler("cpu")
    run = Run("attached", "adam", scaler=scaler, interval=2)
    for index in range(40):
        inputs, target = run.batch(index)
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = run.criterion(run.model(inputs), target)
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
    assert run.tuner.history[-1].loss < 0.9 * run.tuner.history[0].loss
