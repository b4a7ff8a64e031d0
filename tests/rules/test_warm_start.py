"""The warm start finds the same scale from everywhere, in few evaluations, and moves no weight."""

import copy
import math
import warnings

import pytest
import torch
from tests.core import networks
from torch.nn import functional as F

import apo
from apo.rules.warm_start import first_turning_point

BOUNDS = (1e-10, 1e4)
RATES = [10.0**k for k in range(-8, 4)]


class Counted:
    def __init__(self, slope):
        self.slope, self.calls = slope, 0

    def __call__(self, rate):
        self.calls += 1
        return self.slope(rate)


@pytest.mark.parametrize("turn", [3e-9, 1e-4, 0.09, 1.0, 7e3])
def test_the_turning_point_is_found_to_an_eighth_of_a_decade_from_every_bottom(turn):
    found = {first_turning_point(lambda rate: rate - turn, bottom, BOUNDS) for bottom in [*RATES, 0.0213, 5.7]}
    assert all(rate <= turn < rate * 10 ** (1 / 8) * (1 + 1e-12) for rate in found)


@pytest.mark.parametrize("turn", [1e-6, 1e-4, 0.09])
def test_a_turning_point_three_decades_above_the_bottom_takes_ten_evaluations(turn):
    slope = Counted(lambda rate: rate - turn)
    first_turning_point(slope, turn / 1000, BOUNDS)
    assert slope.calls <= 10


@pytest.mark.parametrize("bottom", [1e-8, 1e-5])
def test_the_first_of_several_turning_points_is_found(bottom):
    """Q rises from 1e-3 on, and falls again beyond 1e-2, where the network is dead."""
    found = first_turning_point(lambda rate: 1.0 if 1e-3 <= rate < 1e-2 else -1.0, bottom, BOUNDS)
    assert found == pytest.approx(1e-3 / 10 ** (1 / 8), rel=1e-9)


@pytest.mark.parametrize("bottom", [1e-8, 1.0, 1e3])
def test_a_slope_that_is_not_a_number_counts_as_too_large(bottom):
    def slope(rate):
        return -1.0 if rate < 1e-3 else float("nan") if rate > 1e-1 else float("inf")

    assert first_turning_point(slope, bottom, BOUNDS) == pytest.approx(1e-3 / 10 ** (1 / 8), rel=1e-9)


def test_an_error_of_the_loss_counts_as_too_large_and_an_error_of_apo_does_not():
    def slope(rate):
        if rate > 0.1:
            raise RuntimeError("all elements of input should be between 0 and 1")
        return -1.0

    assert first_turning_point(slope, 1e-6, BOUNDS) == pytest.approx(0.1, rel=1e-9)

    def broken(rate):
        raise apo.ReplayError("the batch has changed")

    with pytest.raises(apo.ReplayError):
        first_turning_point(broken, 1e-6, BOUNDS)


@pytest.mark.parametrize("value", [1.0, -1.0, 0.0, float("nan")])
@pytest.mark.parametrize("bottom", [1e-10, 1e-8, 1.0, 1e3, 1e4])
def test_without_a_change_of_sign_there_is_no_turning_point(value, bottom):
    slope = Counted(lambda rate: value)
    assert first_turning_point(slope, bottom, BOUNDS) is None
    assert slope.calls < 32


def build(name, rate, **options):
    model = networks.build("norm-and-dropout", torch.float32)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=rate, **options)
    return apo.APO(optimizer, model, criterion=F.cross_entropy, interval=2)


OPTIMIZERS = [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("RMSprop", {}), ("AdamW", {"weight_decay": 0.1})]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=["sgd", "sgd-momentum", "adam", "rmsprop", "adamw"])
def test_runs_from_initial_rates_over_eleven_orders_of_magnitude_are_bit_identical(name, options):
    batches = networks.batches("norm-and-dropout", 6, dtype=torch.float32)
    ends, rates = [], []
    for rate in RATES:
        tuner = build(name, rate, **options)
        torch.manual_seed(3)
        for x, y in batches:
            tuner.step(x, y)
        ends.append([p.detach().clone() for p in tuner.model.parameters()])
        rates.append(tuner.history.column("lr/0"))
    assert all(rate == rates[0] for rate in rates)
    assert all(torch.equal(p, q) for end in ends for p, q in zip(end, ends[0], strict=True))


def test_the_start_is_a_tenth_of_the_rate_at_which_the_look_ahead_is_best():
    batch = networks.batches("norm-and-dropout", 1)[0]
    model = networks.build("norm-and-dropout").eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    rule = apo.LearningRate(optimizer, over_relaxation=1.0, meta_optimizer=lambda phi: torch.optim.SGD(phi, lr=0.0))
    tuner = apo.APO(rule, model, criterion=F.cross_entropy, fsd_weight=0.3)
    twin = copy.deepcopy(model)
    tuner.step(*batch)
    F.cross_entropy(twin(batch[0]), batch[1]).backward()
    theta, gradient = (
        [value.clone() for value in values]
        for values in zip(*((p.detach(), p.grad) for p in twin.parameters()), strict=True)
    )
    old = twin(batch[0]).detach()

    def objective(rate):
        with torch.no_grad():
            for p, start, g in zip(twin.parameters(), theta, gradient, strict=True):
                p.copy_(start - rate * g)
            outputs = twin(batch[0])
            return F.cross_entropy(outputs, batch[1]) + 0.3 * apo.CategoricalKL()(outputs, old)

    grid = [10 ** (k / 40) for k in range(-120, 120)]
    best = min(grid, key=objective)
    assert tuner.history[0].lr[0] * 10 <= best * 1.06
    assert tuner.history[0].lr[0] * 10 * 10 ** (1 / 8) >= best / 1.06


def test_ratios_of_param_groups_survive_the_warm_start():
    for per_group in (False, True):
        model = networks.build("norm-and-dropout", torch.float32)
        first, *rest = model.parameters()
        groups = [{"params": [first], "lr": 1e-6}, {"params": rest, "lr": 5e-6}]
        frozen = lambda phi: torch.optim.SGD(phi, lr=0.0)  # noqa: E731
        rule = apo.LearningRate(torch.optim.SGD(groups), per_group=per_group, meta_optimizer=frozen)
        apo.APO(rule, model, criterion=F.cross_entropy).step(
            *networks.batches("norm-and-dropout", 1, dtype=torch.float32)[0]
        )
        one, other = rule.rates()
        assert one > 1e-4
        assert other == pytest.approx(5 * one, rel=1e-12)


def test_without_a_gradient_to_follow_the_initial_rate_stays():
    model = networks.build("norm-and-dropout", torch.float32)
    rule = apo.LearningRate(torch.optim.SGD(model.parameters(), lr=0.125))
    tuner = apo.APO(rule, model, criterion=lambda outputs, target: 0.0 * outputs.sum(), fsd_weight=0.0)
    with pytest.warns(apo.ApoWarning, match="meta-gradient is exactly zero"):
        tuner.step(*networks.batches("norm-and-dropout", 1, dtype=torch.float32)[0])
    assert rule.rates()[0] == pytest.approx(0.125)


def test_a_loss_that_is_down_at_rounding_is_no_reason_to_speak_of_a_gradient_of_zero():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    tuner = apo.APO(torch.optim.SGD(model.parameters(), lr=1e-6), model, F.binary_cross_entropy_with_logits)
    inputs, target = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0], [0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", apo.ApoWarning)
        while tuner.steps < 60 or tuner.is_meta_step():
            tuner.step(inputs, target)
        for _ in range(20):
            tuner.step(1e3 * inputs, target)  # classified beyond doubt
    assert 0 <= tuner.history[-1].loss < 1e-6 * tuner.history[0].loss
    assert tuner.history[-1].meta_gradient_norm == 0.0


def test_switched_off_the_initial_rate_is_where_learning_begins():
    model = networks.build("norm-and-dropout", torch.float32)
    rule = apo.LearningRate(torch.optim.SGD(model.parameters(), lr=1e-6), warm_start=False)
    tuner = apo.APO(rule, model, criterion=F.cross_entropy)
    tuner.step(*networks.batches("norm-and-dropout", 1, dtype=torch.float32)[0])
    assert abs(math.log(rule.rates()[0] / 1e-6)) <= 0.2 + 1e-12


def test_a_preconditioner_is_scaled_to_the_same_matrix_from_every_lr():
    found = []
    for lr in (1e-6, 1e-3, 1.0, 1e3):
        model = networks.build("norm-and-dropout")
        optimizer = apo.Kronecker(model, lr=lr)
        rule = apo.Preconditioned(optimizer, warm_start=0.1, meta_optimizer=lambda phi: torch.optim.SGD(phi, lr=0.0))
        apo.APO(rule, model, criterion=F.cross_entropy).step(*networks.batches("norm-and-dropout", 1)[0])
        found.append(next(iter(optimizer.to_dense().values())))
    assert found[0].abs().max() > 1e-3
    for dense in found[1:]:
        torch.testing.assert_close(dense, found[0], rtol=1e-9, atol=0)
