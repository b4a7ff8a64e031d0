"""What the two batches say about a look-ahead is the quadratic model of each, and sigma and the step follow from it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import apo
from apo.rules.base import Comparison, Outcome
from apo.rules.over_relaxation import OverRelaxation, momentum_in
from apo.rules.turning_point import TurningPoint

SHARE, FSD, WSD = 0.3, 0.2, 0.05


class Listening(apo.LearningRate):
    """Keeps what the meta-step tells it, and the look-ahead it was about."""

    def propose(self, theta):
        self.proposal = super().propose(theta)
        return self.proposal

    def meta_update(self, gradients, outcome=None):
        self.outcome = outcome
        self.ahead = [delta.clone() for delta in self.proposal.displacement()]
        super().meta_update(gradients, outcome)


def batch(seed, size=12):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, 5, generator=generator).double(), torch.randn(size, 2, generator=generator).double())


def seen(comparison, **known):
    return Outcome(0, 2.0, 1.9, comparison=comparison, **known)


def test_promise_and_price_are_those_of_each_batch_alone():
    """A linear network with squared error is a quadratic: the model is exact, in float64."""
    torch.manual_seed(0)
    model = nn.Linear(5, 2).double()
    rule = Listening(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), warm_start=False)
    options = {"other_batch_share": SHARE, "fsd_weight": FSD, "wsd_weight": WSD, "interval": 1}
    tuner = apo.APO(rule, model, F.mse_loss, fsd_batch=[batch(7)], **options)
    tuner.step(*batch(1))
    theta = [p.detach().clone() for p in model.parameters()]
    tuner.step(*batch(2))
    comparison = rule.outcome.comparison
    for (x, y), promise, price in (
        (batch(2), comparison.own_promise, comparison.own_price),
        (batch(7), comparison.other_promise, comparison.other_price),
    ):
        flat = torch.cat([p.reshape(-1) for p in theta]).requires_grad_()
        delta = torch.cat([d.reshape(-1) for d in rule.ahead])

        def loss(weights, x=x, y=y):
            return F.mse_loss(F.linear(x, weights[:10].reshape(2, 5), weights[10:]), y)

        gradient = torch.autograd.functional.jacobian(loss, flat)
        hessian = torch.autograd.functional.hessian(loss, flat)
        assert promise == pytest.approx(float(-gradient @ delta), rel=1e-8)
        assert price == pytest.approx(float(delta @ hessian @ delta), rel=1e-8)
    length = sum(float(d.square().sum()) for d in rule.ahead)
    record = tuner.history[-1]
    assert comparison.proximal_price == pytest.approx(2 * FSD * record.fsd + WSD * length, rel=1e-9)


def trained(loss_of, criterion, **options):
    """Returns what a rule was told in a loop with a meta-step at every other step, and the curve of the rate."""
    torch.manual_seed(0)
    model = nn.Linear(5, 2).double()
    rule = Listening(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    tuner, told = apo.attach(rule, model, criterion, interval=2, **options), []
    for step in range(9):
        x, y = batch(step)
        rule.optimizer.zero_grad()
        loss_of(criterion, model, x, y).backward()
        rule.optimizer.step()
        told.append(rule.outcome.comparison)
    return told[::2], tuner.history.column("lr/0")


def test_two_halves_of_a_loss_in_two_calls_are_told_apart_as_the_whole_in_one():
    """Two columns of one output, each with half of the weight, are their mean square error: losses and FSD alike."""
    criterion = nn.MSELoss()
    whole = trained(lambda criterion, model, x, y: criterion(model(x), y), criterion, wsd_weight=WSD)

    def in_halves(criterion, model, x, y):
        output = model(x)
        return 0.5 * criterion(output[:, :1], y[:, :1]) + 0.5 * criterion(output[:, 1:], y[:, 1:])

    halves = trained(in_halves, criterion, wsd_weight=WSD)
    for one, two in zip(whole[0], halves[0], strict=True):
        assert tuple(two) == pytest.approx(tuple(one), rel=1e-8)
    assert halves[1] == pytest.approx(whole[1], rel=1e-8)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.1), (0.3, 0.6)])
def test_two_terms_in_two_calls_are_compared_as_their_sum_in_one(weights):
    """The second network call sees other data and the term another weight; without the terms whose unit is a loss's."""
    first, second = weights

    def both(one, y, two, z):
        return first * F.mse_loss(one, y) + second * F.mse_loss(two, z)

    def in_one(criterion, model, x, y):
        return criterion(model(x), y, model(2 * x), 3 * y)

    def in_two(criterion, model, x, y):
        return first * criterion(model(x), y) + second * criterion(model(2 * x), 3 * y)

    one = trained(in_one, apo.criterion(both), fsd_weight=0.0, discrepancy=apo.SquaredError())
    two = trained(in_two, nn.MSELoss(), fsd_weight=0.0)
    for summed, apart in zip(one[0], two[0], strict=True):
        assert tuple(apart) == pytest.approx(tuple(summed), rel=1e-8)


def test_losses_of_another_number_or_total_than_those_before_are_not_compared():
    def by_turns(criterion, model, x, y):
        turns.append(None)
        if len(turns) % 2:
            return criterion(model(x), y) + 0.4 * criterion(model(2 * x), y)
        return criterion(model(x), y)

    turns = []
    told, _ = trained(by_turns, nn.MSELoss())
    assert told[0] is not None and told[1:] == [None] * 4

    def ever_less(criterion, model, x, y):
        turns.append(None)
        return 2.0 ** -len(turns) * (criterion(model(x), y) + 0.4 * criterion(model(2 * x), y))

    turns.clear()
    assert trained(ever_less, nn.MSELoss())[0][1:] == [None] * 4


@pytest.mark.parametrize("options", [{"fsd_batch": "same"}, {"other_batch_share": 0.0}])
def test_without_a_share_of_another_batch_there_is_nothing_to_compare(options):
    model = nn.Linear(5, 2).double()
    rule = Listening(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), warm_start=False)
    apo.APO(rule, model, F.mse_loss, **options).step(*batch(1))
    assert rule.outcome.comparison is None


def test_a_batch_stream_without_targets_leaves_the_loss_on_the_steps_own_batch():
    model = nn.Linear(5, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    tuner = apo.APO(optimizer, model, F.mse_loss, fsd_batch=[batch(7)[0]])
    assert tuner.objective.other_batch_share > 0
    loss = tuner.step(*batch(1))
    assert tuner.history[0].loss == pytest.approx(float(loss))


@pytest.mark.parametrize(
    ("curvature", "signal", "expected", "adaptive"),
    [
        *((0.0, 0.5, 2.0, False), (1.0, 0.0, 2.0, False), (0.5, 0.25, 3.8, False), (0.25, 0.9, 3.8, True)),
        *((1.0, 0.5, 16.0, False), (1.0, 0.5, 8.0, True)),
    ],
)
def test_shared_curvature_and_signal_together_bear_more_over_relaxation(curvature, signal, expected, adaptive):
    sigma = OverRelaxation(0.9, adaptive)
    for _ in range(50):
        sigma.observe(seen(Comparison(2.0, 0.8, 2.0 * signal, 0.8 * curvature, 0.1)))
    assert sigma.value == pytest.approx(expected, rel=2e-3)


def test_a_promise_that_rounding_may_have_made_says_nothing():
    sigma, turning_point = OverRelaxation(0.9), TurningPoint()
    tiny = Comparison(1e-4, 2e-4, 1e-4, 2e-4, 0.0)
    sigma.observe(seen(tiny, resolution=1e-3))
    assert sigma.value == 1.4
    assert turning_point.change(tiny, 0.3, 0.1, 1.4, 0.1, resolution=1e-3) == -1.0  # the slope still says: down
    better = tiny._replace(own_price=0.0, other_price=0.0)
    assert turning_point.change(better, 0.3, 0.1, 1.4, 0.1, resolution=1e-3) == 0.1
    assert turning_point.change(tiny, 0.3, 0.1, 1.4, 0.1) < 0  # in exact arithmetic all of it counts


def test_growing_weights_lower_sigma_and_shrinking_ones_do_not_raise_it():
    """Without shared curvature sigma is sigma_0: 2 at first, and with normalisation 2 + 8 * 0.125 = 3."""
    sigma = OverRelaxation(0.9)
    sigma.observe(seen(None, weights=2.0))
    comparison = Comparison(1.0, 0.8, 0.125, 0.0, 0.1)
    sigma.observe(seen(comparison, weights=8.0))
    assert sigma.value == pytest.approx(3.0 / math.sqrt(8.0 / 2.0))
    sigma.observe(seen(comparison, weights=1.0))
    assert sigma.value == pytest.approx(3.0)
    sigma.observe(seen(comparison._replace(other_promise=20.0), weights=1.0))
    assert sigma.value == pytest.approx(4.0)
    plain = OverRelaxation(0.9)
    plain.observe(seen(comparison))
    assert plain.value == pytest.approx(2.0)


def test_in_long_runs_with_normalisation_sigma_approaches_a_constant_from_above_alone():
    bold, noisy = Comparison(1.0, 0.8, 0.125, 0.0, 0.1), Comparison(1.0, 0.8, 0.0, 0.8, 0.1)
    sigma, expected = OverRelaxation(0.9), {999: 3.0, 1_999: 1.4 + 1.6 / 2, 15_999: 1.4 + 1.6 / 16}
    for step in range(16_000):  # the loss falls far, so noise sets no limit
        sigma.observe(seen(bold, weights=1.0)._replace(step=step, loss=-100.0 * math.log(1 + step)))
        assert sigma.value == pytest.approx(expected.get(step, sigma.value))
    grown = OverRelaxation(0.9)
    grown.observe(seen(noisy, weights=1.0))
    grown.observe(seen(noisy, weights=9.0)._replace(step=15_999))
    assert grown.value < 1.0
    plain = OverRelaxation(0.9)
    plain.observe(seen(bold)._replace(step=15_999))
    assert plain.value == pytest.approx(2.0)


def test_a_look_ahead_that_promises_nothing_says_nothing():
    sigma, turning_point = OverRelaxation(0.9), TurningPoint()
    for comparison in (Comparison(-1.0, 0.8, 0.3, 0.8, 0.1), Comparison(1.0, math.nan, 0.3, 0.8, 0.1)):
        sigma.observe(seen(comparison))
        assert turning_point.change(comparison, 0.3, 0.1, 1.4, 0.1) is None
    assert sigma.value == 1.4


def test_the_rate_settles_at_sigma_times_the_turning_point():
    """Promise 2 and price 5 per unit of the rate: Q turns at 0.4."""
    turning_point, rate = TurningPoint(), 1e-3
    for _ in range(100):
        ahead = rate / 1.4
        comparison = Comparison(2 * ahead, 4.5 * ahead**2, 2 * ahead, 4.5 * ahead**2, 0.5 * ahead**2)
        rate *= math.exp(min(max(turning_point.change(comparison, 0.3, ahead, 1.4, rate), -0.2), 0.2))
    assert rate == pytest.approx(1.4 * 0.4, rel=1e-3)


def test_under_a_schedule_the_rate_rises_if_all_of_it_is_too_low_and_falls_if_the_part_in_force_is_too_high():
    def change(turns_at, part):
        comparison = Comparison(1.0, 1.0, 1.0, 1.0, 0.0)
        return TurningPoint().change(comparison, 0.5, ahead=turns_at, target=1.0, rate=0.1, part=part)

    assert change(turns_at=0.2, part=0.1) > 0
    assert change(turns_at=0.05, part=0.1) == 0
    assert change(turns_at=0.05, part=1.0) < 0
    assert change(turns_at=0.005, part=0.1) < 0


@pytest.mark.parametrize(
    "comparison",
    [
        Comparison(1e-8, 1e-9, 0.0, 1e-9, 0.0),
        Comparison(1.0, -1.0, 0.0, -1.0, 0.0),
        Comparison(1.0, 1e-9, 0.0, 0.0, 0.0),
    ],
    ids=["nothing", "no price", "a price that is rounding"],
)
def test_a_short_look_ahead_that_sees_no_turning_point_does_not_raise_the_rate(comparison):
    def change(part):
        return TurningPoint().change(comparison, 0.0, 0.1, target=1.0, rate=0.1, resolution=1e-7, part=part)

    assert change(part=1.0) == change(part=0.9999) == 0.1
    assert change(part=0.1) == 0


@pytest.mark.parametrize("weights, adaptive, grows", [(None, False, True), (1.0, False, False), (None, True, False)])
def test_sigma_goes_a_third_of_the_way_to_what_noise_allows_without_batch_norm(weights, adaptive, grows):
    def sigma(signal):
        relaxation = OverRelaxation(0.9, adaptive)
        for step in range(100):
            comparison = Comparison(0.01, 0.005, 0.01 * signal, 0.0025, 0.0)
            loss = 1.0 - 0.05 * math.log(1 + step)
            relaxation.observe(Outcome(step, loss, loss, comparison=comparison, weights=weights))
        return relaxation

    relaxation = sigma(signal=0.25)
    shared = math.sqrt(0.5 * 0.5)
    base = 4.0 if weights else 2.0
    usual = min(base / (shared / 19 + 1 - shared), 8.0 if adaptive else 16.0)
    limit = relaxation.state_dict()["noise"]["_limit"]
    assert limit > 2 * usual
    expected = min(usual * (limit / usual) ** (1 / 3), 16.0) if grows else usual
    assert relaxation.value == pytest.approx(expected, rel=0.02)


def test_in_a_short_run_the_rate_rises_faster_and_falls_as_ever():
    """The turning point is at 0.4, so that sigma 1.4 asks for 0.56."""

    def change(rate, pace):
        comparison = Comparison(2 * rate, 5 * rate**2, 2 * rate, 5 * rate**2, 0.0)
        return TurningPoint().change(comparison, 0.3, rate, 1.4, rate, pace=pace)

    assert change(0.01, 1.0) == pytest.approx(0.1) and change(0.01, 2.5) == pytest.approx(0.25)
    near = math.log(0.56 / 0.5)
    assert change(0.5, 1.0) == pytest.approx(0.3 * near) and change(0.5, 2.5) == pytest.approx(0.75 * near)
    assert change(0.5, 5.0) == pytest.approx(near)  # never beyond the target
    assert change(2.0, 1.0) == change(2.0, 2.5) == pytest.approx(0.3 * math.log(0.56 / 2.0))


def test_the_momentum_of_an_optimizer_is_read_from_its_groups():
    weights = [torch.zeros(2, requires_grad=True)]
    assert momentum_in(torch.optim.SGD(weights, lr=0.1).param_groups[0]) == 0
    assert momentum_in(torch.optim.RMSprop(weights, momentum=0.5).param_groups[0]) == 0.5
    assert momentum_in(torch.optim.AdamW(weights, betas=(0.8, 0.9)).param_groups[0]) == 0.8


def test_every_optimizer_is_compared_unless_a_number_or_the_papers_look_ahead_is_asked_for():
    weights = [torch.zeros(2, requires_grad=True)]
    momentum = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    plain = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad)
    for optimizer in (momentum, *(kind(weights, lr=0.1) for kind in plain)):
        assert apo.LearningRate(optimizer).compares
    for rule in (
        apo.LearningRate(torch.optim.SGD(weights, lr=0.1), look_ahead="step"),
        apo.LearningRate(momentum, over_relaxation=3.0),
        apo.LearningRate.paper(momentum),
    ):
        assert not rule.compares and rule.other_batch_share == 0 and rule.auto_intervals == ((math.inf, 10),)


@pytest.mark.parametrize(("adaptive", "expected"), [(False, 1.65), (True, 2.8)])
@pytest.mark.parametrize("weights", [None, 3.0])
def test_without_momentum_sigma_is_a_constant_that_depends_on_the_optimizer(adaptive, expected, weights):
    """Whatever the batches share: heavy ball bears more because it averages, which these do not."""
    for promise, price in ((0.1, 0.1), (1.0, 1.0)):
        sigma = OverRelaxation(0.0, adaptive)
        sigma.observe(seen(Comparison(1.0, 1.0, promise, price, 0.0), weights=weights))
        assert sigma.value == pytest.approx(expected)


def test_the_over_relaxation_of_an_optimizer_follows_from_its_groups():
    weights, alone = [torch.zeros(2, requires_grad=True)], Comparison(1.0, 1.0, 0.0, 0.0, 0.0)  # nothing is shared
    kinds = (torch.optim.SGD(weights, lr=0.1), torch.optim.RMSprop(weights), torch.optim.AdamW(weights))
    for optimizer, expected in zip(kinds, (1.65, 2.8, 2.0), strict=True):
        sigma = OverRelaxation.of(optimizer.param_groups)
        sigma.observe(seen(alone))
        assert sigma.value == pytest.approx(expected)


def test_rmsprop_may_climb_beyond_what_its_first_step_allows():
    """Its first step is ten times as long as later ones at the same rate, and its turning point as much lower."""
    limits = {}
    for alpha in (0.99, 0.0):
        torch.manual_seed(0)
        model = nn.Linear(5, 2).double()
        rule = apo.LearningRate(torch.optim.RMSprop(model.parameters(), lr=0.1, alpha=alpha))
        apo.APO(rule, model, F.mse_loss).step(*batch(1))
        limits[alpha] = rule.state_dict()["progress"]["_limit"] - rule.state_dict()["progress"]["_start"]
    assert limits[0.0] == pytest.approx(math.log(10)) and limits[0.99] == pytest.approx(math.log(100))


def test_the_first_fifty_steps_are_meta_steps_if_the_interval_is_left_to_the_rule():
    model = nn.Linear(5, 2).double()
    optimizer = torch.optim.Adam(model.parameters())
    tuner = apo.APO(optimizer, model, F.mse_loss)
    assert [step for step in range(80) if tuner.is_meta_step(step)] == [*range(51), 60, 70]
    tuner.detach()
    tuner = apo.APO(optimizer, model, F.mse_loss, interval=10)
    assert [step for step in range(30) if tuner.is_meta_step(step)] == [0, 10, 20]


@pytest.mark.parametrize(
    ("fall", "price", "last"),
    [
        pytest.param(0.5, 0.01, 100, id="climbs"),
        pytest.param(0.5, 5.0, 51, id="is high enough"),
        pytest.param(0.0, 0.01, 50, id="plateau"),
    ],
)
def test_a_rate_that_still_climbs_after_fifty_steps_has_meta_steps_at_every_step_for_a_while(fall, price, last):
    torch.manual_seed(0)
    model = nn.Linear(5, 2).double()
    rule = apo.LearningRate(torch.optim.Adam(model.parameters()))
    first = float(apo.APO(rule, model, F.mse_loss).step(*batch(1)))
    often = 0
    for step in range(1, 200):
        loss = (1.0 - fall) * first
        comparison = Comparison(1.0, price, 1.0, price, 0.0)
        outcome = Outcome(step, loss, loss, share=0.3, comparison=comparison)
        rule.meta_update([torch.tensor(0.1)], outcome)
        rule.after(outcome)
        often = step if rule.interval == 1 else often
    assert often + 1 == last  # the loss falls at step 1, which makes the fifty steps begin there


def test_training_starts_at_a_hundredth_of_the_turning_point_where_meta_steps_come_often():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)).double()
    starts = {}
    for interval in ("auto", 10):
        twin = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)).double()
        twin.load_state_dict(model.state_dict())
        frozen = lambda phi: torch.optim.SGD(phi, lr=0.0)  # noqa: E731
        rule = apo.LearningRate(torch.optim.Adam(twin.parameters()), meta_optimizer=frozen)
        apo.APO(rule, twin, F.mse_loss, interval=interval).step(*batch(1))
        starts[interval] = rule.learned_rates()[0]
    assert starts["auto"] == pytest.approx(starts[10] / 10)


def test_an_outcome_without_comparison_leaves_phi_to_the_meta_optimizer():
    rule = apo.LearningRate(torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1, momentum=0.9))
    rule.meta_update([torch.tensor(1.0)], Outcome(0, 1.0, 0.9))
    assert rule.learned_rates()[0] == pytest.approx(0.1 * math.exp(-0.1))
