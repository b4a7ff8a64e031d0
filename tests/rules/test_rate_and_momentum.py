"""The rule that learns rate and momentum of SGD together."""

import math

import pytest
import torch
from torch.nn import functional as F

import apo


def sgd(**options):
    weights = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    return torch.optim.SGD([weights], **({"lr": 0.1, "momentum": 0.5} | options))


def strong(phi):
    return torch.optim.SGD(phi, lr=1.0)


def test_phi_are_the_log_of_the_rate_and_the_logit_of_the_momentum():
    rule = apo.RateAndMomentum(sgd(momentum=0.8), meta_optimizer=strong)
    assert [float(p) for p in rule.phi()] == pytest.approx([math.log(0.1), math.log(4.0)])
    rule.meta_update([torch.tensor(1.0), torch.tensor(math.log(4.0))])
    group = rule.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == pytest.approx((0.1 / math.e, 0.5))


@pytest.mark.parametrize("gradient", [-50.0, 50.0])
def test_the_momentum_stays_between_zero_and_one(gradient):
    rule = apo.RateAndMomentum(sgd(), meta_optimizer=strong)
    rule.meta_update([torch.tensor(0.0), torch.tensor(gradient)])
    assert 0 <= rule.optimizer.param_groups[0]["momentum"] <= 1


def test_rate_and_momentum_both_grow_where_larger_ones_help():
    curvature = torch.tensor([1.0, 20.0], dtype=torch.float64)

    class Quadratic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, scale):
            return self.weights * scale

    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.1)
    rule = apo.RateAndMomentum(optimizer)
    tuner = apo.APO(
        rule,
        model,
        criterion=lambda z, _: (curvature * z**2).sum() / 2,
        fsd_weight=0.1,
        discrepancy=apo.SquaredError(),
        interval=1,
    )
    losses = [float(tuner.step(torch.ones(1, dtype=torch.float64), None)) for _ in range(200)]
    assert optimizer.param_groups[0]["lr"] > 3e-3
    assert optimizer.param_groups[0]["momentum"] > 0.3
    assert losses[-1] < 0.01 * losses[0]  # the coefficients it began with would have left 0.03
    assert tuner.history.column("momentum")[-1] == pytest.approx(optimizer.param_groups[0]["momentum"], abs=0.05)


@pytest.mark.parametrize(
    "options",
    [{"momentum": 0.0}, {"momentum": 1.0}, {"nesterov": True}, {"dampening": 0.1}],
    ids=["no momentum", "momentum one", "nesterov", "dampening"],
)
def test_other_kinds_of_sgd_are_refused(options):
    with pytest.raises(ValueError, match="0 < momentum < 1, nesterov=False and dampening=0"):
        apo.RateAndMomentum(sgd(**options))


def test_other_optimizers_are_refused():
    with pytest.raises(TypeError, match=r"optimizer must be torch.optim.SGD, got Adam"):
        apo.RateAndMomentum(torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]))


def test_groups_with_other_coefficients_take_those_of_the_first():
    first, second = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "lr": 0.7, "momentum": 0.9}]
    rule = apo.RateAndMomentum(torch.optim.SGD(groups, lr=0.1, momentum=0.5))
    assert [group["momentum"] for group in rule.optimizer.param_groups] == [0.5, 0.5]
    assert rule.rates() == pytest.approx((0.1, 0.1))


def test_a_later_group_that_cannot_be_learned_is_refused():
    first, second = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "nesterov": True}]
    with pytest.raises(ValueError, match="nesterov=False"):
        apo.RateAndMomentum(torch.optim.SGD(groups, lr=0.1, momentum=0.5))


def test_a_schedule_of_each_group_scales_its_own_step_on_meta_iterations():
    def run(with_apo):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
        optimizer = torch.optim.SGD(
            [{"params": layer.parameters()} for layer in (model[0], model[2])], lr=0.1, momentum=0.5
        )
        step = optimizer.step
        if with_apo:
            rule = apo.RateAndMomentum(optimizer, meta_optimizer=lambda phi: torch.optim.SGD(phi, lr=0.0))
            tuner = apo.APO(rule, model, criterion=F.cross_entropy, interval=1)
            step = tuner.step
        x, y = torch.randn(8, 3).double(), torch.randint(2, (8,))
        for _ in range(4):
            optimizer.param_groups[1]["lr"] *= 0.5
            optimizer.zero_grad()
            if with_apo:
                tuner.backward(x, y)
            else:
                F.cross_entropy(model(x), y).backward()
            step()
        return list(model.parameters())

    for found, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
