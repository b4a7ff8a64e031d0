"""The learning-rate rule's own promises: limits, bounds, groups, presets and errors."""

import math

import pytest
import torch
from tests.core import networks
from torch.nn import functional as F

import apo
from apo.rules import as_rule
from apo.rules.base import Outcome


def parameter(**options):
    return torch.nn.Parameter(torch.ones(2, 2, **options))


def rule_of(rate=0.1, **options):
    return apo.LearningRate(torch.optim.SGD([parameter()], lr=rate), **options)


def strong(phi):
    """A meta-optimizer that moves phi by its whole gradient."""
    return torch.optim.SGD(phi, lr=1.0)


def log_rate(rule):
    return float(rule.phi()[0])


@pytest.mark.parametrize("gradient", [-5.0, 5.0])
def test_one_meta_update_changes_the_log_of_the_rate_by_at_most_max_change(gradient):
    for limit in (0.05, 0.2, 3.0):
        rule = rule_of(meta_optimizer=strong, max_change=limit)
        rule.meta_update([torch.tensor(gradient)])
        assert log_rate(rule) == pytest.approx(math.log(0.1) - math.copysign(limit, gradient), abs=1e-12)
        assert rule.rates()[0] == pytest.approx(0.1 * math.exp(-math.copysign(limit, gradient)))


def test_small_changes_are_not_limited():
    rule = rule_of(meta_optimizer=strong, max_change=0.2)
    rule.meta_update([torch.tensor(0.125)])
    assert log_rate(rule) == pytest.approx(math.log(0.1) - 0.125, abs=1e-12)


def test_without_max_change_the_meta_optimizer_decides():
    rule = rule_of(meta_optimizer=strong, max_change=None)
    rule.meta_update([torch.tensor(5.0)])
    assert log_rate(rule) == pytest.approx(math.log(0.1) - 5.0)


def test_the_rate_stays_within_its_bounds():
    rule = rule_of(meta_optimizer=strong, max_change=None, bounds=(0.01, 1.0))
    for gradient, bound in ((50.0, 0.01), (-50.0, 1.0)):
        rule.meta_update([torch.tensor(gradient)])
        assert rule.rates()[0] == pytest.approx(bound)
        (sentence,) = rule.after(Outcome(0, 1.0, 0.9))
        assert f"bound {bound:g}" in sentence
    rule.meta_update([torch.tensor(1.0)])
    assert rule.after(Outcome(0, 1.0, 0.9)) == []


def test_the_default_meta_optimizer_is_bias_corrected_so_that_its_first_step_has_the_size_of_later_ones():
    rule = rule_of(max_change=None)
    steps = []
    for _ in range(5):
        before = log_rate(rule)
        rule.meta_update([torch.tensor(0.37)])
        steps.append(log_rate(rule) - before)
    assert steps == pytest.approx([-0.1] * 5, rel=1e-5)


def test_the_papers_preset_is_the_papers():
    rule = apo.LearningRate.paper(torch.optim.SGD([parameter()], lr=0.1, momentum=0.9))
    assert (rule.look_ahead, rule.over_relaxation, rule.max_change, rule.warm_start) == ("step", 1.0, None, False)
    assert type(rule.meta_optimizer) is torch.optim.RMSprop
    assert rule.meta_optimizer.param_groups[0]["lr"] == 0.1
    rule.meta_update([torch.tensor(1.0)])
    # RMSprop without bias correction: the first step is 0.1 / sqrt(0.01), a factor of e.
    assert rule.rates()[0] == pytest.approx(0.1 / math.e, rel=1e-6)


def test_options_win_over_the_papers_preset():
    rule = apo.LearningRate.paper(torch.optim.SGD([parameter()], lr=0.1), max_change=0.3)
    assert (rule.max_change, rule.look_ahead) == (0.3, "step")


def two_group_rule(per_group, rates=(0.1, 0.3)):
    groups = [{"params": [parameter()], "lr": rate} for rate in rates]
    return apo.LearningRate(torch.optim.SGD(groups), per_group=per_group, meta_optimizer=strong, max_change=None)


def test_one_rate_for_all_keeps_the_ratios_of_the_groups():
    rule = two_group_rule(per_group=False)
    assert len(rule.phi()) == 1
    rule.meta_update([torch.tensor(1.0)])
    assert rule.rates() == pytest.approx((0.1 / math.e, 0.3 / math.e))


def test_one_rate_per_group_moves_each_by_itself():
    rule = two_group_rule(per_group=True)
    assert len(rule.phi()) == 2
    rule.meta_update([torch.tensor(1.0), torch.tensor(-1.0)])
    assert rule.rates() == pytest.approx((0.1 / math.e, 0.3 * math.e))


def test_per_group_rates_go_their_own_ways_in_training():
    model = networks.build("norm-and-dropout")
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.05)
    tuner = apo.APO(apo.LearningRate(optimizer, per_group=True), model, criterion=F.cross_entropy, interval=1)
    for batch in networks.batches("norm-and-dropout", 6) * 3:
        tuner.step(*batch)
    one, other = tuner.history[-1].lr
    assert [group["lr"] for group in optimizer.param_groups] == [one, other]
    assert abs(math.log(one / other)) > 0.05


def test_the_meta_gradient_of_a_group_that_does_not_move_is_zero_on_the_device_of_the_others():
    moving = parameter(device="meta")
    moving.grad = torch.ones_like(moving)
    optimizer = torch.optim.SGD([{"params": [moving]}, {"params": []}], lr=0.1)
    rule = apo.LearningRate(optimizer, per_group=True, check_linear=False)
    proposal = rule.propose({moving: moving.detach().clone()})
    assert [gradient.device.type for gradient in proposal.pull_back([torch.ones_like(moving)])] == ["meta", "meta"]


def test_the_loss_term_contains_coupled_decay_only():
    coupled = apo.LearningRate(torch.optim.SGD([parameter()], lr=0.1, weight_decay=0.2))
    decoupled = apo.LearningRate(torch.optim.AdamW([parameter()], lr=0.1, weight_decay=0.2))
    for rule, expected in ((coupled, [0.2]), (decoupled, [0.0])):
        for p in rule.optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        theta = {p: p.detach().clone() for p in rule.optimizer.param_groups[0]["params"]}
        assert rule.propose(theta).coupled_decay == expected


@pytest.mark.parametrize("start", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_step_of_a_meta_iteration_is_measured_precisely_at_tiny_rates(start):
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(64).to(start))
    gradient = torch.randn(64).to(start)
    rule = apo.LearningRate(torch.optim.SGD([weights], lr=1e-7), look_ahead="step", over_relaxation=1.0)
    weights.grad = gradient
    theta = {weights: weights.detach().clone()}
    rule.before_step()
    with rule.measuring():
        rule.optimizer.step()
    (found,) = rule.propose(theta).displacement()
    assert found.dtype == torch.float32
    error = torch.linalg.vector_norm(found + 1e-7 * gradient.float()) / torch.linalg.vector_norm(found)
    # Subtracting weights that moved by 1e-7 would leave nothing of the step at all. float16 cannot go far from 1.
    assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}[start]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"look_ahead": "far"}, ValueError, "look_ahead must be 'tail' or 'step', got 'far'"),
        ({"over_relaxation": 0.0}, ValueError, "over_relaxation must be positive or 'auto', got 0.0"),
        ({"over_relaxation": float("nan")}, ValueError, "over_relaxation must be positive or 'auto', got nan"),
        ({"max_change": -1.0}, ValueError, "max_change must be positive or None, got -1.0"),
        ({"bounds": (1.0, 0.1)}, ValueError, "bounds must be 0 < lowest < highest"),
        ({"bounds": (0.0, 0.1)}, ValueError, "bounds must be 0 < lowest < highest"),
        (
            {"over_relaxation": "2"},
            TypeError,
            "over_relaxation must be a number or 'auto', got '2'",
        ),
        ({"max_change": "x"}, TypeError, "max_change must be a number or None, got 'x'"),
        ({"bounds": None}, TypeError, r"bounds must be a pair of numbers, got None: pass \(1e-10, 1e4\)"),
        ({"bounds": (0.1,)}, TypeError, "bounds must be a pair of numbers"),
        ({"bounds": ("0", "1")}, TypeError, "bounds must be a pair of numbers"),
        ({"meta_optimizer": torch.optim.SGD([parameter()])}, TypeError, "meta_optimizer must be a function .* got SGD"),
        ({"rate": 0.0}, ValueError, "lr of param group 0 must be positive, got 0.0"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        rule_of(**options)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got Parameter"):
        apo.LearningRate(parameter())
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer or an apo rule, got float"):
        as_rule(0.1)


def test_the_state_of_a_rule_with_other_groups_is_refused():
    with pytest.raises(ValueError, match="2 meta-parameters that do not fit the 1 of LearningRate"):
        two_group_rule(per_group=False).load_state_dict(two_group_rule(per_group=True).state_dict())


def test_an_optimizer_gets_the_rule_that_fits_it():
    rule = rule_of()
    assert as_rule(rule) is rule
    assert type(as_rule(torch.optim.Adam([parameter()]))) is apo.LearningRate
    assert type(as_rule(apo.Kronecker(torch.nn.Linear(2, 2)))) is apo.Preconditioned
