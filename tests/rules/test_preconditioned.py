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


def eigenbasis_on_a_quadratic(**options):
    """Returns a rule over one matrix, and a function that takes a meta-step on a quadratic at the same weights."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    root = torch.randn(6, 6, dtype=torch.float64)
    curvature, theta = root @ root.T, weight.detach().flatten()
    rule = apo.Preconditioned(apo.Eigenbasis(weight, lr=1e-4), **options)

    def loss(at):
        return 0.5 * float(at @ curvature @ at)

    def meta_step():
        weight.grad = (curvature @ theta).reshape(3, 2)
        proposal = rule.propose({})
        ahead = theta + proposal.displacement()[0].flatten()
        gradients = proposal.pull_back([(curvature @ ahead).reshape(3, 2)])
        rule.meta_update(gradients)
        rule.after(Outcome(0, loss(theta), loss(ahead)))
        return gradients

    def relative_to_the_turning_point():
        step = rule.propose({}).displacement()[0].flatten()
        return float(step @ curvature @ step) / -float(step @ curvature @ theta)

    return rule, meta_step, relative_to_the_turning_point


def test_all_rates_of_an_eigenbasis_go_to_the_turning_point():
    rule, meta_step, relative = eigenbasis_on_a_quadratic()
    rule.meta_optimizer.param_groups[0]["lr"] = 0.0  # the scale alone
    meta_step()
    assert relative() < 0.1
    for _ in range(200):
        meta_step()
    assert relative() == pytest.approx(1.0, rel=1e-3)
    rule.optimizer.scale_rates(3.0)  # far too long
    for _ in range(50):
        meta_step()
    assert relative() == pytest.approx(1.0, rel=1e-2)


def test_a_meta_optimizer_of_the_users_own_sees_the_gradient_of_q_and_moves_an_eigenbasis_alone():
    rule, meta_step, _ = eigenbasis_on_a_quadratic(meta_optimizer=lambda phi: torch.optim.SGD(phi, lr=1.0))
    before = [factor.clone() for factor in rule.phi()]
    gradients = meta_step()
    for factor, old, gradient in zip(rule.phi(), before, gradients, strict=True):
        torch.testing.assert_close(factor, old - gradient)


def test_meta_gradients_of_an_eigenbasis_are_relative_to_the_promise_of_the_step():
    """A rate's meta-gradient is minus the promise while steps are too short to bend the loss."""
    rule, meta_step, _ = eigenbasis_on_a_quadratic()
    meta_step()
    proposal = rule.propose({})
    gradient = next(iter(rule.optimizer.moved())).grad
    at_once = proposal.pull_back([gradient])
    rates = [name == "log_rate" for layer in rule.optimizer.layers for name in layer.block.factors]
    found = [value for value, is_rate in zip(proposal.relative(at_once), rates, strict=True) if is_rate]
    torch.testing.assert_close(found, [torch.full_like(found[0], -1.0)])
    assert all(float(value.abs()) == 1.0 for value in proposal.relative([1e6 * value for value in at_once]))
