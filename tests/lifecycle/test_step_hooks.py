"""Closures, interruptions, subclasses and other people's hooks: nobody sees the rate at which a step is measured."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from tests.lifecycle.harness import DOORS, Run, assert_equal_bits, batch, plain_network, sgdm
from torch import nn
from torch.optim import SGD, Adam

import apo


def attached(optimizer_of=sgdm, **options):
    torch.manual_seed(0)
    model, criterion = plain_network(), nn.CrossEntropyLoss()
    optimizer = optimizer_of(model)
    tuner = apo.attach(optimizer, model, criterion, **({"interval": 3} | options))
    return model, criterion, optimizer, tuner


def closure_for(model, criterion, optimizer, index, look=lambda: None):
    def closure():
        optimizer.zero_grad()
        loss = criterion(model(batch(index)[0]), batch(index)[1])
        loss.backward()
        look()
        return loss

    return closure


@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_sees_the_rate_in_force(keyword):
    model, criterion, optimizer, tuner = attached()
    seen = []
    for index in range(7):
        before = float(optimizer.param_groups[0]["lr"])
        closure = closure_for(
            model, criterion, optimizer, index, lambda: seen.append(float(optimizer.param_groups[0]["lr"]))
        )
        optimizer.step(**{"closure": closure}) if keyword else optimizer.step(closure)
        assert seen[-1] == before
    assert len(tuner.history) == 3


@pytest.mark.parametrize("rule", ["sgdm", "adam", "kronecker", "rate and momentum"])
def test_training_with_closures_is_training_without(rule):
    plain, closed = Run("attached", rule).train(range(8)), Run("attached", rule)
    for index in range(8):
        closed.optimizer.step(closure_for(closed.model, closed.criterion, closed.optimizer, index))
    assert_equal_bits(closed.weights(), plain.weights())


def test_a_closure_that_raises_leaves_weights_and_rate_as_they_were():
    model, criterion, optimizer, _ = attached()
    rate, weights = float(optimizer.param_groups[0]["lr"]), copy.deepcopy(model.state_dict())

    def fail():
        raise RuntimeError("the loader is empty")

    with pytest.raises(RuntimeError, match="the loader is empty"):
        optimizer.step(closure_for(model, criterion, optimizer, 0, fail))
    assert optimizer.param_groups[0]["lr"] == rate == optimizer.state_dict()["param_groups"][0]["lr"]
    assert_equal_bits(list(model.state_dict().values()), list(weights.values()))


class Interrupted(SGD):
    """Moves the weights and is then broken off, as by Ctrl-C."""

    at = -1
    taken = 0
    own = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        if id(self.param_groups[0]["params"][0]) != self.own:
            return loss  # a copy, by which apo learns what the step does
        self.taken += 1
        if self.taken == self.at:
            raise KeyboardInterrupt
        return loss


def interrupted_at(step: int):
    def build(model):
        optimizer = Interrupted(model.parameters(), lr=0.05, momentum=0.9)
        optimizer.at, optimizer.own = step, id(optimizer.param_groups[0]["params"][0])
        return optimizer

    return build


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("first", ["model", "optimizer", "detach"])
def test_what_is_saved_after_an_interruption_are_the_last_good_weights(door, first):
    run = Run(door, interrupted_at(4))
    run.train(range(3))
    good, rate = run.weights(), run.lr
    with pytest.raises(KeyboardInterrupt):
        run.step(*run.batch(3))  # a meta-step
    if first == "optimizer":
        assert run.optimizer.state_dict()["param_groups"][0]["lr"] == rate
    if first == "detach":
        run.tuner.detach()
    assert_equal_bits(run.weights(), good)
    assert run.lr == rate


@pytest.mark.parametrize("door", DOORS)
def test_training_goes_on_after_an_interruption(door):
    run = Run(door, interrupted_at(4))
    run.train(range(3))
    with pytest.raises(KeyboardInterrupt):
        run.step(*run.batch(3))
    run.train(range(3, 9))
    assert len(run.tuner.history) == 3 and run.tuner.steps == 9
    assert all(bool((p.abs() < 10).all()) for p in run.model.parameters())


class Counting(Adam):
    """Has a step of its own around Adam's; where Adam was used before, torch runs the hooks of both."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_subclass_that_calls_the_step_of_its_base_counts_once():
    Adam([torch.zeros(1, requires_grad=True)])  # has torch wrap the step of Adam itself
    model, criterion, optimizer, tuner = attached(lambda m: Counting(m.parameters(), lr=1e-3), interval=4)
    for index in range(8):
        optimizer.step(closure_for(model, criterion, optimizer, index))
    assert tuner.steps == 8 and [record.step for record in tuner.history] == [0, 4]


def test_a_subclass_has_the_tail_and_the_decay_of_its_base():
    class Renamed(SGD):
        pass

    class Changed(SGD):
        def step(self, closure=None):
            return super().step(closure)

    parameters = [torch.zeros(2, requires_grad=True)]
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    assert apo.LearningRate(Renamed(parameters, **settings)).look_ahead == "tail"
    assert apo.LearningRate(Changed(parameters, **settings)).look_ahead == "tail"  # found by what it does
    for kind in (Renamed, Changed):
        rule = apo.LearningRate(kind(parameters, **settings))
        parameters[0].grad = torch.ones(2)
        assert rule.propose({parameters[0]: torch.zeros(2)}).coupled_decay == [0.01]


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_others_see_the_step_that_was_taken(when):
    torch.manual_seed(0)
    model, criterion = plain_network(), nn.CrossEntropyLoss()
    optimizer = sgdm(model)
    moves, rates = [], []
    last = [p.detach().clone() for p in model.parameters()]

    def after(*_):
        weights = [p.detach().clone() for p in model.parameters()]
        moves.append(max(float((p - old).abs().max()) for p, old in zip(weights, last, strict=True)))
        last[:] = weights

    def register():
        optimizer.register_step_post_hook(after)
        optimizer.register_step_pre_hook(lambda *_: rates.append(float(optimizer.param_groups[0]["lr"])))

    if when == "before":
        register()
    apo.attach(optimizer, model, criterion, interval=1)
    optimizer.step(closure_for(model, criterion, optimizer, 0))  # the first step puts our hook behind later ones
    if when == "after":
        register()
        optimizer.step(closure_for(model, criterion, optimizer, 1))
        rates.clear()
    for index in range(2, 6):
        optimizer.step(closure_for(model, criterion, optimizer, index))
    assert max(moves) < 1 and max(rates) < 10


def test_a_listener_that_raises_does_not_undo_the_step():
    def fail(record):
        raise RuntimeError("the logger is gone")

    run = Run("explicit", on_meta_step=fail)
    before = run.weights()
    with pytest.raises(RuntimeError, match="the logger is gone"):
        run.step(*run.batch(0))
    assert run.tuner.steps == 1 and len(run.tuner.history) == 1
    assert not all(torch.equal(one, other) for one, other in zip(run.weights(), before, strict=True))


def test_two_threads_train_without_noticing_each_other():
    runs, errors = [Run("attached", interval=1) for _ in range(2)], []

    def train(run):
        try:
            run.train(range(30))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [len(run.tuner.history) for run in runs] == [30, 30]


@pytest.mark.parametrize("kind", [Adam, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adamax, SGD])
@pytest.mark.parametrize("per_group", [False, True])
def test_a_param_group_without_gradients_needs_no_care(kind, per_group):
    model = plain_network()
    model[0].requires_grad_(False)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    rule = apo.LearningRate(kind(groups, lr=1e-3), per_group=per_group)
    tuner = apo.APO(rule, model, F.cross_entropy, interval=1)
    for index in range(3):
        tuner.step(*batch(index))
    assert len(tuner.history) == 3


def test_an_empty_first_param_group_needs_no_care():
    model = plain_network()
    optimizer = Adam([{"params": []}, {"params": list(model.parameters())}], lr=1e-3)
    tuner = apo.APO(optimizer, model, F.cross_entropy, interval=1)
    tuner.step(*batch(0))
    assert len(tuner.history) == 1


def test_the_meta_gradient_of_complex_weights_is_a_derivative():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

        def forward(self, x):
            return (x.to(torch.complex128) @ self.weight).abs()

    losses = {}
    for rate in (0.1 * 0.999, 0.1, 0.1 * 1.001):
        torch.manual_seed(0)
        model = Complex()
        rule = apo.LearningRate.paper(SGD(model.parameters(), lr=rate))
        tuner = apo.APO(rule, model, F.cross_entropy, fsd_weight=0.0)
        tuner.step(*batch(0, dtype=torch.float64))
        losses[rate] = tuner.history[0]
    low, here, high = losses.values()
    expected = (high.objective - low.objective) / 0.002
    assert here.meta_gradient_norm == pytest.approx(abs(expected), rel=1e-4)


def test_a_network_that_is_evaluated_after_an_interruption_has_the_last_good_weights():
    run = Run("attached", interrupted_at(4))
    run.train(range(3))
    inputs = run.batch(5)[0]
    with torch.no_grad():
        good = run.model(inputs)
    with pytest.raises(KeyboardInterrupt):
        run.step(*run.batch(3))
    with torch.no_grad():
        assert torch.equal(run.model(inputs), good)


def test_the_explicit_door_leaves_no_gradient_in_its_inputs():
    run = Run("explicit", interval=1)
    inputs, target = run.batch(0)
    inputs.requires_grad_()
    run.step(inputs, target)
    once = inputs.grad.clone()
    inputs.grad = None
    twin = Run("explicit", interval=1)
    F.cross_entropy(twin.model(inputs), target).backward()
    assert torch.equal(once, inputs.grad)


@pytest.mark.parametrize("interval", [1, 3])
def test_hooks_of_others_see_the_step_that_the_explicit_door_took(interval):
    run = Run("explicit", interval=interval)
    moves, rates = [], []
    last = run.weights()

    def after(*_):
        moves.append(max(float((p - old).abs().max()) for p, old in zip(run.weights(), last, strict=True)))
        last[:] = run.weights()

    run.optimizer.register_step_post_hook(after)
    run.optimizer.register_step_pre_hook(lambda *_: rates.append(float(run.optimizer.param_groups[0]["lr"])))
    run.train(range(5))
    assert len(moves) == len(rates) == 5
    assert min(moves) > 0 and max(moves) < 1 and max(rates) < 10
    assert_equal_bits(run.weights(), Run("explicit", interval=interval).train(range(5)).weights())


def test_a_step_past_the_explicit_door_is_refused():
    run = Run("explicit")
    run.train(range(2))
    before = run.weights()
    with pytest.raises(RuntimeError, match=r"call tuner.step\(\), or use apo.attach"):
        run.optimizer.step()
    assert_equal_bits(before, run.weights())


def test_the_explicit_door_goes_back_at_once_when_its_step_is_interrupted():
    run = Run("explicit", interrupted_at(4))
    run.train(range(3))
    good = run.weights()
    with pytest.raises(KeyboardInterrupt):
        run.step(*run.batch(3))  # a meta-step
    assert_equal_bits([p.detach() for p in run.model.parameters()], good)  # without asking the tuner or a state_dict
