"""The preconditioner's rule: hand-over, intervals, presets and errors."""

import pytest
import torch
from tests.core import networks
from torch.nn import functional as F

import apo
from apo.rules.base import Outcome


def build(warmup_steps=3, **options):
    model = networks.build("norm-and-dropout")
    warmup = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = apo.Kronecker(model, lr=0.05, warmup=warmup, warmup_steps=warmup_steps)
    return model, apo.Preconditioned(optimizer, **options)


def helps(rule):
    return rule.after(Outcome(0, 1.0, 0.9))


def hurts(rule):
    return rule.after(Outcome(0, 1.0, 1.1))


def take_steps(rule, count):
    for p in rule.optimizer.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    for _ in range(count):
        rule.optimizer.take_step()


def test_the_guard_hands_over_once_the_warm_up_is_over_and_the_look_ahead_helps_several_times_in_a_row():
    _, rule = build(patience=2)
    helps(rule)
    helps(rule)
    assert rule.optimizer.warming_up, "the steps asked for are not taken yet"
    take_steps(rule, 3)
    assert rule.optimizer.warming_up, "the guard has not spoken"
    hurts(rule)
    helps(rule)
    assert rule.optimizer.warming_up, "one success is not enough"
    helps(rule)
    assert not rule.optimizer.warming_up


@pytest.mark.parametrize("objective", [float("nan"), float("inf"), 1.0])
def test_a_look_ahead_that_is_no_better_does_not_count(objective):
    _, rule = build(patience=1)
    take_steps(rule, 3)
    rule.after(Outcome(0, 1.0, objective))
    assert rule.optimizer.warming_up


def test_without_guard_the_step_count_decides():
    _, rule = build(guard=False)
    take_steps(rule, 3)
    assert not rule.optimizer.warming_up
    assert not apo.Preconditioned.paper(build()[1].optimizer).optimizer.guarded


def test_during_the_warm_up_its_optimizer_moves_the_weights_while_p_is_learned():
    model, rule = build(warmup_steps=100)
    twin = networks.build("norm-and-dropout")
    bare = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9)
    start = [factor.clone() for factor in rule.phi()]
    tuner = apo.APO(rule, model, criterion=F.cross_entropy, interval=1)
    for index, (x, y) in enumerate(networks.batches("norm-and-dropout", 4)):
        torch.manual_seed(index)
        tuner.step(x, y)
        torch.manual_seed(index)
        bare.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        bare.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(rule.phi(), start, strict=True))


def test_the_warm_up_may_have_an_interval_of_its_own():
    model, rule = build(warmup_steps=4, warmup_interval=1, guard=False)
    tuner = apo.APO(rule, model, criterion=F.cross_entropy, interval=6)
    for batch in networks.batches("norm-and-dropout", 13):
        tuner.step(*batch)
    assert [record.step for record in tuner.history] == [0, 1, 2, 3, 6, 12]


@pytest.mark.parametrize("warmup_steps", [3, 400])
def test_a_warm_up_that_does_not_end_says_so_and_falls_back_to_the_tuners_interval(warmup_steps):
    _, rule = build(warmup_steps=warmup_steps, warmup_interval=1)
    take_steps(rule, warmup_steps + max(warmup_steps, 300))
    assert rule.interval == 1 and not hurts(rule)
    take_steps(rule, 1)
    assert rule.interval is None and "guard=False" in hurts(rule)[0]
    sentences = [helps(rule) for _ in range(3)]
    assert not rule.optimizer.warming_up and not sentences[-1]


def test_the_summary_tells_the_size_of_p():
    model, rule = build()
    tuner = apo.APO(rule, model, criterion=F.cross_entropy)
    tuner.step(*networks.batches("norm-and-dropout", 1)[0])
    summary = tuner.history[0].summary
    assert summary["P/min"] <= summary["P/mean"] <= summary["P/max"]
    assert summary["P/mean"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 0}, "patience must be a whole number of at least 1, got 0"),
        ({"warmup_interval": 0}, "warmup_interval must be a whole number of at least 1, got 0"),
        ({"warm_start": -1.0}, "warm_start must be positive, None or 'auto', got -1.0"),
        ({"warm_start": "half"}, "warm_start must be positive, None or 'auto', got 'half'"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_an_ordinary_optimizer_is_refused():
    with pytest.raises(TypeError, match="optimizer must be an apo preconditioner, got SGD"):
        apo.Preconditioned(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
