"""How often, by what and in which mode a watched loss is back-propagated."""

from __future__ import annotations

import pytest
import torch
from tests.lifecycle.harness import Run, assert_same_run, network_with_dropout_and_batchnorm
from torch import nn

PAPER = {"rule": "paper", "fsd_batch": "same", "dtype": torch.float64}


def test_a_loss_that_is_back_propagated_twice_has_weight_two():
    twice, doubled = Run("attached", **PAPER), Run("attached", **PAPER)
    for index in range(4):
        inputs, target = twice.batch(index)
        twice.optimizer.zero_grad()
        loss = twice.criterion(twice.model(inputs), target)
        loss.backward(retain_graph=True)
        loss.backward()
        twice.optimizer.step()
        doubled.optimizer.zero_grad()
        for _ in range(2):  # as two micro-batches
            doubled.backward(inputs, target)
        doubled.optimizer.step()
    first, second = twice.tuner.history, doubled.tuner.history
    assert first.column("loss") == pytest.approx(second.column("loss"), rel=1e-6)
    assert first.column("look_ahead_loss") == pytest.approx(second.column("look_ahead_loss"), rel=1e-6)


def test_a_loss_whose_first_gradients_were_cleared_counts_once():
    plain, again = Run("attached", **PAPER), Run("attached", **PAPER)
    inputs, target = again.batch(0)
    loss = again.criterion(again.model(inputs), target)
    loss.backward(retain_graph=True)
    again.optimizer.zero_grad()
    loss.backward()
    again.optimizer.step()
    assert_same_run(plain.train([0]), again)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("of", ["parameters", "one parameter", "inputs"])
def test_a_look_at_gradients_by_autograd_grad_does_not_count(when, of):
    plain, probed = Run("attached", **PAPER), Run("attached", **PAPER)

    def probe() -> None:
        inputs, target = probed.batch(9)
        parameters = list(probed.model.parameters())
        asked = {"parameters": parameters, "one parameter": parameters[-1:], "inputs": [inputs.requires_grad_()]}[of]
        torch.autograd.grad(probed.criterion(probed.model(inputs), target), asked)

    for index in range(4):
        inputs, target = probed.batch(index)
        probed.optimizer.zero_grad()
        if when == "before":
            probe()
        probed.backward(inputs, target)
        if when == "after":
            probe()
        probed.optimizer.step()
    assert_same_run(plain.train(range(4)), probed)


def test_a_penalty_on_a_gradient_does_not_count_its_loss_twice():
    run = Run("attached", **PAPER)
    inputs, target = run.batch(0)
    inputs.requires_grad_()
    loss = run.criterion(run.model(inputs), target)
    (gradient,) = torch.autograd.grad(loss, [inputs], create_graph=True)
    (loss + 0.1 * gradient.square().sum()).backward()
    run.optimizer.step()
    assert run.tuner.history[0].loss == pytest.approx(loss.item(), rel=1e-6)


def test_a_loop_whose_gradients_all_come_from_autograd_grad_is_watched():
    plain, own = Run("attached", **PAPER), Run("attached", **PAPER)
    for index in range(4):
        inputs, target = own.batch(index)
        parameters = list(own.model.parameters())
        gradients = torch.autograd.grad(own.criterion(own.model(inputs), target), parameters)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        own.optimizer.step()
    assert_same_run(plain.train(range(4)), own)


def test_a_backward_pass_into_some_parameters_counts():
    run = Run("attached", **PAPER)
    inputs, target = run.batch(0)
    last = list(run.model.parameters())[-1]
    run.criterion(run.model(inputs), target).backward(inputs=[last])
    run.optimizer.step()
    assert len(run.tuner.history) == 1


def test_modes_that_change_before_the_step_do_not_change_the_replay():
    def build() -> nn.Module:
        model = network_with_dropout_and_batchnorm()
        model[1].eval()  # and stays so
        return model

    plain, switched = Run("attached", network=build), Run("attached", network=build)
    for index in range(4):
        for run in (plain, switched):
            torch.manual_seed(index)
            inputs, target = run.batch(index)
            run.optimizer.zero_grad()
            run.backward(inputs, target)
            if run is switched:
                run.model.eval()
            run.optimizer.step()
        assert not any(module.training for module in switched.model.modules())
        switched.model.train()[1].eval()
    assert_same_run(plain, switched)
