from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tests.lifecycle.harness import DOORS, RULES, Run, assert_equal_bits, assert_same_run, batch
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler

import apo

OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def hooks_on(subject: nn.Module | Optimizer) -> int:
    if isinstance(subject, Optimizer):
        return sum(len(vars(subject)[name]) for name in OPTIMIZER_HOOKS)
    return sum(
        len(hooks) for module in subject.modules() for name, hooks in vars(module).items() if name.endswith("_hooks")
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("door", DOORS)
def test_detaching_leaves_no_hook_and_ordinary_groups(door, rule):
    run = Run(door, rule).train(range(5))
    assert hooks_on(run.optimizer) == (6 if door == "attached" else 5)
    assert (hooks_on(run.model), hooks_on(run.criterion)) == ((3, 2) if door == "attached" else (1, 0))
    rates = run.tuner.rule.rates()
    run.tuner.detach()
    run.tuner.detach()  # once more does no harm
    assert [hooks_on(subject) for subject in (run.optimizer, run.model, run.criterion)] == [0, 0, 0]
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        assert type(group) is dict
        assert type(group["lr"]) is float
        assert group["lr"] == rate
        assert "initial_lr" not in group
    assert "apo" not in run.optimizer.state_dict()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("door", DOORS)
def test_training_goes_on_as_with_the_bare_optimizer(door, rule):
    run, reference = Run(door, rule).train(range(5)), Run(door, rule).train(range(5))
    run.tuner.detach()
    bare = reference.optimizer
    if not isinstance(bare, apo.Preconditioner):  # a preconditioner is its own bare optimizer
        groups = [{k: v for k, v in group.items() if k != "initial_lr"} for group in bare.param_groups]
        bare = type(bare)([{**group, "lr": float(group["lr"])} for group in groups])
        bare.state.update(reference.optimizer.state)
    else:
        reference.tuner.detach()
    for index in range(5, 9):
        inputs, target = batch(index)
        for model, optimizer in ((run.model, run.optimizer), (reference.model, bare)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()
    assert_equal_bits(run.weights(), reference.weights())


@pytest.mark.parametrize("door", DOORS)
def test_the_context_manager_detaches_also_after_an_error(door):
    run = Run(door)
    with pytest.raises(KeyError), run.tuner as tuner:
        assert tuner is run.tuner
        run.train(range(2))
        raise KeyError
    assert hooks_on(run.optimizer) + hooks_on(run.model) == 0


@pytest.mark.parametrize("door", DOORS)
def test_a_detached_optimizer_can_be_attached_again(door):
    run = Run(door).train(range(5))
    rate = run.lr
    run.tuner.detach()
    with pytest.warns(apo.ApoWarning, match="has taken steps before"):
        again = apo.attach(run.optimizer, run.model, run.criterion, interval=1)
    assert again.rule.learned_rates() == pytest.approx([rate])
    run.optimizer.zero_grad()
    run.criterion(run.model(run.batch(5)[0]), run.batch(5)[1]).backward()
    run.optimizer.step()
    assert (len(again.history), len(run.tuner.history)) == (1, 2)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_an_optimizer_can_have_one_tuner_only(door, wrapped):
    run = Run(door)
    second = apo.LearningRate(run.optimizer) if wrapped else run.optimizer
    with pytest.raises(ValueError, match=r"optimizer already has a tuner: use that one, or call its detach\(\)"):
        apo.attach(second, run.model, run.criterion)
    with pytest.raises(ValueError, match="optimizer already has a tuner"):
        apo.APO(second, run.model, nn.functional.cross_entropy)


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one that takes steps of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


def test_an_optimizer_that_wraps_another_can_have_one_tuner_only():
    model, criterion = nn.Linear(3, 2), nn.MSELoss()
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    apo.attach(optimizer, model, criterion)
    with pytest.raises(ValueError, match="optimizer already has a tuner"):
        apo.attach(optimizer, model, criterion)


def test_a_refused_second_tuner_leaves_the_first_one_working():
    run, reference = Run("attached"), Run("attached").train(range(7))
    with pytest.raises(ValueError, match="already has a tuner"):
        apo.attach(run.optimizer, run.model, run.criterion)
    assert_same_run(run.train(range(7)), reference)


def test_an_attempt_that_failed_can_be_repeated():
    reference = Run("attached").train(range(7))
    run = Run("attached")
    run.tuner.detach()
    with pytest.raises(ValueError, match="fsd_weight"):
        apo.attach(run.optimizer, run.model, run.criterion, fsd_weight=-1.0)
    run.tuner = apo.attach(run.optimizer, run.model, run.criterion, interval=3)
    assert_same_run(run.train(range(7)), reference)


def test_a_scheduler_built_after_detaching_starts_at_the_learned_rate():
    run = Run("attached").train(range(5))
    rate = run.lr
    run.tuner.detach()
    lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.5)
    assert run.lr == pytest.approx(0.5 * rate)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=1e-7, total_steps=20),
    ],
    ids=["ExponentialLR", "CosineAnnealingLR", "OneCycleLR"],
)
@pytest.mark.parametrize("rule", ["learning rate", "rate and momentum"])
def test_a_schedule_goes_on_when_its_optimizer_is_detached_and_attached_again(rule, make):
    def starts_far_off(model: nn.Module) -> apo.Rule:
        optimizer = SGD(model.parameters(), lr=1e-7, momentum=0.9)
        return apo.LearningRate(optimizer) if rule == "learning rate" else apo.RateAndMomentum(optimizer)

    def factor() -> float:
        return run.optimizer.param_groups[0].factor  # type: ignore[attr-defined]

    run = Run("attached", starts_far_off)
    scheduler = make(run.optimizer)
    run.train(range(5), scheduler)
    learned, left_at = run.lr / factor(), factor()
    run.tuner.detach()
    assert run.lr == pytest.approx(learned * left_at)
    run.train(range(5, 6), scheduler)
    detached = run.lr / learned
    kind = type(run.tuner.rule)
    says = pytest.warns(apo.ApoWarning, match="steps before") if kind is apo.LearningRate else nullcontext()
    with says:
        run.tuner = apo.attach(kind(run.optimizer), run.model, run.criterion)  # type: ignore[call-arg, arg-type]
    assert factor() == pytest.approx(detached)
    assert run.lr == pytest.approx(learned * detached)
    run.train(range(6, 8), scheduler)
    assert 0.1 < factor() <= 1.0


def test_a_rule_that_is_given_up_leaves_its_learned_rate_to_the_next_one():
    run = Run("attached", lambda model: SGD(model.parameters(), lr=1e-7))
    scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    run.train(range(3), scheduler)
    rate = run.lr
    assert apo.LearningRate(run.optimizer).learned_rates() == pytest.approx([8 * rate])
    assert run.lr == pytest.approx(rate)


def test_a_closed_form_scheduler_that_is_built_anew_after_detaching_goes_on_from_the_rate_in_force():
    def halves(step: int) -> float:
        return 0.5**step

    run = Run("attached", lambda model: SGD(model.parameters(), lr=1e-7))
    scheduler = lr_scheduler.LambdaLR(run.optimizer, halves)
    run.train(range(3), scheduler)
    rate = run.lr
    run.tuner.detach()
    scheduler = lr_scheduler.LambdaLR(run.optimizer, halves, last_epoch=scheduler.last_epoch - 1)
    assert run.lr == pytest.approx(rate)
    run.tuner = apo.attach(run.optimizer, run.model, run.criterion)
    assert run.tuner.rule.learned_rates() == pytest.approx([8 * rate])  # type: ignore[attr-defined]
    scheduler.step()
    assert run.lr == pytest.approx(rate / 2)


def test_hooks_of_others_stay():
    run = Run("attached")
    calls = []
    run.model.register_forward_hook(lambda *_: calls.append("model"))
    run.optimizer.register_step_post_hook(lambda *_: calls.append("optimizer"))
    run.tuner.detach()
    run.step(*run.batch(0))
    assert calls == ["model", "optimizer"]
    assert torch.isfinite(run.model[0].weight).all()
