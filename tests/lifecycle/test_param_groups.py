from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.lifecycle.harness import (
    CLASSES,
    DOORS,
    FEATURES,
    Run,
    assert_equal_bits,
    assert_same_run,
    batch,
    kronecker,
    network_with_dropout_and_batchnorm,
    plain_network,
    saved_and_loaded,
    sgdm,
    two_groups,
)
from torch import Tensor, nn
from torch.optim import SGD, Adam, lr_scheduler

import apo

RULES = ["sgdm", "adam", "per group", "kronecker", "diagonal", "rate and momentum"]


def rates(run: Run) -> list[float]:
    return [float(group["lr"]) for group in run.optimizer.param_groups]


# --- several groups ---


@pytest.mark.parametrize("door", DOORS)
def test_the_ratio_of_the_groups_rates_stays(door):
    run = Run(door, lambda model: apo.LearningRate(SGD(two_groups(model), lr=0.1))).train(range(8))
    assert rates(run)[0] != pytest.approx(0.02)
    assert rates(run)[1] / rates(run)[0] == pytest.approx(5.0)
    assert run.tuner.history[-1].lr == tuple(rates(run))


@pytest.mark.parametrize("door", DOORS)
def test_rates_per_group_are_learned_separately(door):
    run = Run(door, "per group").train(range(40))
    assert rates(run)[1] / rates(run)[0] != pytest.approx(5.0, rel=0.05)
    assert len(run.tuner.rule.phi()) == 2


def test_one_group_learned_per_group_is_one_rate_for_all():
    adam = functools.partial(torch.optim.Adam, lr=0.1, betas=(0.0, 0.99))
    together = Run("explicit", lambda model: apo.LearningRate(sgdm(model), meta_optimizer=adam))
    apart = Run("explicit", lambda model: apo.LearningRate(sgdm(model), meta_optimizer=adam, per_group=True))
    assert_same_run(together.train(range(8)), apart.train(range(8)))


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_a_group_that_is_added_while_running_takes_part(door, per_group):
    def build() -> Run:
        def rule(model: nn.Module) -> apo.LearningRate:
            return apo.LearningRate(SGD(model[0].parameters(), lr=0.05, momentum=0.9), per_group=per_group)

        return Run(door, rule)

    def add(run: Run) -> None:
        run.optimizer.add_param_group({"params": list(run.model[2].parameters()), "lr": 0.1})

    run = build().train(range(4))
    fixed = run.model[2].weight.detach().clone()
    add(run)
    run.train(range(4, 5))
    assert not torch.equal(fixed, run.model[2].weight)
    assert rates(run)[1] == pytest.approx(0.1)
    run.train(range(5, 9))
    assert len(run.tuner.history[-1].lr) == 2
    assert len(run.tuner.rule.phi()) == (2 if per_group else 1)
    state = saved_and_loaded({"model": run.model.state_dict(), "tuner": run.tuner.state_dict()})
    resumed = build()
    add(resumed)
    resumed.model.load_state_dict(state["model"])
    resumed.tuner.load_state_dict(state["tuner"])
    assert_same_run(run.train(range(9, 14)), resumed.train(range(9, 14)))


def first_layer_only(per_group: bool, lr: float | Tensor = 1e-7) -> Run:
    """Train a part of the network from a bad guess, far from which the learned rate goes at once."""
    run = Run("attached", lambda model: apo.LearningRate(Adam(model[0].parameters(), lr=lr), per_group=per_group))
    return run.train(range(4))


@pytest.mark.parametrize("per_group", [False, True])
def test_a_group_that_is_added_at_a_part_of_the_rate_in_force_has_that_part(per_group):
    run = first_layer_only(per_group)
    scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    run.train(range(4, 5), scheduler)
    first = run.optimizer.param_groups[0]
    run.optimizer.add_param_group({"params": list(run.model[2].parameters()), "lr": first["lr"] / 10})
    run.train(range(5, 6))
    assert rates(run)[1] == pytest.approx(rates(run)[0] / 10)
    assert run.tuner.rule.learned_rates()[1] == pytest.approx(first.learned / 10)  # the schedule's factor is the same
    scheduler.step()
    assert rates(run)[1] == pytest.approx(rates(run)[0] / 10)
    run.train(range(6, 10))
    if not per_group:
        assert rates(run)[1] == pytest.approx(rates(run)[0] / 10)


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("lr", [1e-7, torch.tensor(1e-7)], ids=["number", "tensor"])
def test_a_group_that_is_added_without_a_rate_starts_like_the_others(lr, per_group):
    run = first_layer_only(per_group, lr)
    run.optimizer.add_param_group({"params": list(run.model[2].parameters())})
    run.train(range(4, 6))
    assert rates(run)[0] > 1e-4
    assert rates(run)[1] == pytest.approx(rates(run)[0])


def test_a_group_may_be_added_while_the_schedule_is_at_zero():
    run = first_layer_only(per_group=False)
    run.optimizer.param_groups[0]["lr"] = 0.0
    run.optimizer.add_param_group({"params": list(run.model[2].parameters()), "lr": 0.25})
    run.train(range(4, 6))
    assert (rates(run), run.tuner.rule.learned_rates()[1]) == ([0.0, 0.0], pytest.approx(0.25))


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("look_ahead", ["tail", "step"])
@pytest.mark.parametrize("per_group", [False, True])
def test_a_group_without_parameters_does_no_harm(per_group, look_ahead, place):
    def rule(model: nn.Module) -> apo.LearningRate:
        groups: list[dict[str, Any]] = [{"params": list(model.parameters())}, {"params": []}]
        optimizer = Adam(groups if place == "last" else groups[::-1], lr=0.01)
        return apo.LearningRate(optimizer, per_group=per_group, look_ahead=look_ahead)

    run = Run("attached", rule).train(range(7))
    assert len(run.tuner.history) == 3
    assert torch.isfinite(torch.tensor(rates(run))).all()


def test_a_run_with_an_added_group_resumes_in_one_that_had_it_from_the_start():
    def rule(model: nn.Module) -> apo.LearningRate:
        return apo.LearningRate(SGD(model[0].parameters(), lr=0.05), per_group=True)

    run = Run("attached", rule).train(range(2))
    run.optimizer.add_param_group({"params": list(run.model[2].parameters()), "lr": 0.1})
    run.train(range(2, 7))
    resumed = Run("attached", lambda model: apo.LearningRate(SGD(two_groups(model), lr=0.1), per_group=True))
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.optimizer.load_state_dict(saved_and_loaded(run.optimizer.state_dict()))
    assert_same_run(run.train(range(7, 11)), resumed.train(range(7, 11)))


# --- parameters that do not take part ---


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("door", DOORS)
def test_frozen_parameters_stay(door, rule):
    def network() -> nn.Module:
        model = plain_network()
        model[0].weight.requires_grad_(False)
        return model

    run = Run(door, rule, network)
    before = run.model[0].weight.clone()
    run.train(range(7))
    assert torch.equal(before, run.model[0].weight)
    assert run.model[0].weight.grad is None
    assert len(run.tuner.history) == 3


class Branching(nn.Module):
    """A network one branch of which is used only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, CLASSES)
        self.branch = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor, both: bool = False) -> Tensor:
        return self.trunk(inputs) + self.branch(inputs) if both else self.trunk(inputs)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("door", DOORS)
def test_parameters_without_gradient_stay_and_may_get_one_later(door, rule):
    run = Run(door, rule, Branching)
    before = run.model.branch.weight.detach().clone()
    run.train(range(4))
    assert torch.equal(before, run.model.branch.weight)
    for index in range(4, 11):
        inputs, target = run.batch(index)
        run.optimizer.zero_grad()
        both = index % 2 == 0
        if isinstance(run.tuner, apo.APO):
            run.tuner.backward({"inputs": inputs, "both": both}, target)
        else:
            run.criterion(run.model(inputs, both=both), target).backward()
        run.update()
    assert not torch.equal(before, run.model.branch.weight)
    assert len(run.tuner.history) == 4


@pytest.mark.parametrize("rule", ["sgdm", "adam", "rate and momentum"])
@pytest.mark.parametrize("door", DOORS)
def test_a_parameter_may_be_unfrozen_later(door, rule):
    def network() -> nn.Module:
        model = plain_network()
        model[0].requires_grad_(False)
        return model

    run = Run(door, rule, network).train(range(4))
    before = run.model[0].weight.detach().clone()
    run.model[0].requires_grad_(True)
    run.train(range(4, 8))
    assert not torch.equal(before, run.model[0].weight)


@pytest.mark.parametrize("door", DOORS)
def test_a_step_without_any_gradient_does_nothing(door):
    run = Run(door)
    before = run.weights()
    with pytest.warns(apo.ApoWarning, match="no parameter of the optimizer has a gradient"):
        run.tuner.step() if door == "explicit" else run.optimizer.step()
    assert_equal_bits(before, run.weights())
    assert len(run.tuner.history) == 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.second(self.first(inputs).tanh()).tanh())


@pytest.mark.parametrize("rule", ["sgdm", "adam", "kronecker", "diagonal", "full", "rate and momentum"])
@pytest.mark.parametrize("door", DOORS)
def test_tied_weights_stay_tied(door, rule):
    run = Run(door, rule, Tied)
    before = run.model.first.weight.detach().clone()
    run.train(range(7))
    assert run.model.first.weight is run.model.second.weight
    assert not torch.equal(before, run.model.first.weight)
    assert len(run.tuner.history) == 3


# --- two optimizers on one network ---


def test_two_optimizers_on_parts_of_one_network_leave_each_others_weights_and_gradients_alone():
    torch.manual_seed(0)
    model, criterion = plain_network(), nn.CrossEntropyLoss()
    optimizers = [SGD(model[0].parameters(), lr=0.05), Adam(model[2].parameters(), lr=1e-3)]
    tuners = [apo.attach(optimizer, model, criterion, interval=2, other_batch_share=0.0) for optimizer in optimizers]
    run = Run("explicit")  # for its batches
    for index in range(6):
        inputs, target = run.batch(index)
        model.zero_grad()
        criterion(model(inputs), target).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        second = [p.detach().clone() for p in model[2].parameters()]
        optimizers[0].step()
        assert_equal_bits(second, [p.detach() for p in model[2].parameters()])
        assert_equal_bits(gradients, [p.grad for p in model.parameters()])
        optimizers[1].step()
    assert [len(tuner.history) for tuner in tuners] == [3, 3]
    assert tuners[0].history[0].loss == tuners[1].history[0].loss


def test_an_optimizer_that_apo_does_not_watch_may_work_beside_it():
    torch.manual_seed(0)
    model, criterion = plain_network(), nn.CrossEntropyLoss()
    watched, other = SGD(model[0].parameters(), lr=0.05), SGD(model[2].parameters(), lr=0.05)
    tuner = apo.attach(watched, model, criterion, interval=1)
    run = Run("explicit")
    for index in range(3):
        inputs, target = run.batch(index)
        model.zero_grad()
        criterion(model(inputs), target).backward()
        expected = [torch.sub(p.detach(), p.grad, alpha=0.05) for p in model[2].parameters()]
        watched.step()
        other.step()
        assert_equal_bits(expected, [p.detach() for p in model[2].parameters()])
    assert len(tuner.history) == 3


# --- forms of the optimizer ---


@pytest.mark.parametrize("door", DOORS)
def test_a_rate_that_is_a_tensor_stays_that_tensor(door):
    lr = torch.tensor(0.05, dtype=torch.float64)
    run = Run(door, lambda model: Adam(model.parameters(), lr=lr))
    plain = Run(door, lambda model: Adam(model.parameters(), lr=0.05))
    assert run.optimizer.param_groups[0]["lr"] is lr
    run.train(range(8))
    plain.train(range(8))
    assert run.optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(plain.lr, rel=1e-6)
    for one, other in zip(run.weights(), plain.weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_float32_rate_does_not_drift_by_its_rounding():
    lr = torch.tensor(0.05)
    run = Run("attached", lambda model: Adam(model.parameters(), lr=lr)).train(range(8))
    assert run.optimizer.param_groups[0].factor == 1.0
    lr.mul_(0.5)  # as a scheduler would
    run.train(range(8, 13))
    assert run.optimizer.param_groups[0].factor == pytest.approx(0.5, rel=1e-6)
    assert lr.item() == pytest.approx(0.5 * run.tuner.rule.learned_rates()[0], rel=1e-6)


def optimizer_forms() -> dict[str, dict[str, Any]]:
    return {"foreach": {"foreach": True}, "loops": {"foreach": False}, "fused": {"fused": True}}


@pytest.mark.parametrize("form", optimizer_forms())
@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("door", DOORS)
def test_all_forms_of_an_optimizer_learn_the_same(door, kind, form):
    reference = Run(door, lambda model: kind(model.parameters(), lr=0.01)).train(range(8))
    run = Run(door, lambda model: kind(model.parameters(), lr=0.01, **optimizer_forms()[form])).train(range(8))
    assert run.lr == pytest.approx(reference.lr, rel=1e-4)
    for one, other in zip(run.weights(), reference.weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


# --- modes ---


@pytest.mark.parametrize("door", DOORS)
def test_training_in_eval_mode_keeps_the_mode_and_batchnorms_statistics(door):
    run = Run(door, network=network_with_dropout_and_batchnorm)
    run.model.eval()
    norm = run.model[1]
    before = norm.running_mean.clone(), norm.num_batches_tracked.clone()
    run.train(range(7))
    assert not any(module.training for module in run.model.modules())
    assert torch.equal(before[0], norm.running_mean) and torch.equal(before[1], norm.num_batches_tracked)
    assert len(run.tuner.history) == 3


@pytest.mark.parametrize("door", DOORS)
def test_a_frozen_batchnorm_in_a_training_network_stays_frozen(door):
    run = Run(door, network=network_with_dropout_and_batchnorm)
    run.model[1].eval()
    before = run.model[1].running_mean.clone()
    run.train(range(7))
    assert run.model.training and not run.model[1].training
    assert torch.equal(before, run.model[1].running_mean)


def test_evaluation_between_steps_changes_nothing():
    plain, evaluated = Run("attached"), Run("attached")
    for index in range(7):
        plain.step(*plain.batch(index))
        inputs, target = evaluated.batch(index)
        evaluated.optimizer.zero_grad()
        loss = evaluated.criterion(evaluated.model(inputs), target)
        evaluated.model.eval()
        with torch.no_grad():
            evaluated.criterion(evaluated.model(evaluated.batch(99)[0]), target)
        evaluated.criterion(evaluated.model(evaluated.batch(98)[0]), target)  # with a graph, but not propagated back
        evaluated.model.train()
        loss.backward()
        F.cross_entropy(evaluated.model(evaluated.batch(97)[0]), target)
        evaluated.optimizer.step()
    assert_same_run(plain, evaluated)


def test_a_preconditioner_over_some_of_the_parameters_moves_only_those():
    run = Run("attached", lambda model: kronecker(model[2])).train(range(0))
    before = run.model[0].weight.detach().clone()
    run.train(range(4))
    assert torch.equal(before, run.model[0].weight)
    assert len(run.tuner.history) == 2


def test_groups_that_share_a_tensor_as_their_rate_learn_rates_of_their_own():
    model = plain_network()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    rule = apo.LearningRate(torch.optim.Adam(groups, lr=torch.tensor(1e-3)), per_group=True)
    tuner = apo.APO(rule, model, F.cross_entropy, interval=1)
    for index in range(5):
        tuner.step(*batch(index))
    learned = rule.learned_rates()
    assert learned[0] != learned[1]
    assert rule.rates() == pytest.approx(learned, rel=1e-6)
