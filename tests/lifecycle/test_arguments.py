"""Arguments of the network and of the criterion that require a gradient, or come from somewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.lifecycle.harness import CLASSES, FEATURES, Run, assert_equal_bits, batch
from torch import Tensor, nn
from torch.optim import SGD

import apo


def attached(model: nn.Module, criterion: nn.Module, parameters=None, lr: float = 0.5, **options) -> apo.Attached:
    """Watch a loop whose first meta-step is at the optimizer's own rate."""
    optimizer = SGD(model.parameters() if parameters is None else parameters, lr=lr)
    return apo.attach(apo.LearningRate.paper(optimizer), model, criterion, interval=1, **({"fsd_weight": 0} | options))


def moved(model: nn.Module, lr: float = 0.5) -> list[Tensor]:
    """Return the weights after a step of plain SGD."""
    return [(p - lr * p.grad).detach() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("target_of", [Tensor.detach, lambda z: z.detach().view(-1, 4), lambda z: z.detach().clone()])
def test_a_detached_output_is_a_constant_target(target_of):
    model, criterion = nn.Linear(FEATURES, 4), nn.MSELoss()
    tuner = attached(model, criterion)
    left, right = batch(0)[0], batch(1)[0]
    target = target_of(model(right))
    criterion(model(left), target).backward()
    weight, bias = moved(model)
    expected = F.mse_loss(F.linear(left, weight, bias), target.clone()).item()
    tuner.optimizer.step()
    assert tuner.history[0].look_ahead_loss == pytest.approx(expected, rel=1e-5)


def test_an_output_of_a_frozen_part_is_still_one_of_the_network():
    class Anchored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.anchor, self.head = nn.Linear(FEATURES, 4).requires_grad_(False), nn.Linear(FEATURES, 4)

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return self.head(inputs), self.anchor(inputs)

    model, criterion = Anchored(), nn.MSELoss()
    tuner = attached(model, criterion, model.head.parameters())
    output, anchor = model(batch(0)[0])
    criterion(output, anchor.view(-1, 4)).backward()
    tuner.optimizer.step()
    assert len(tuner.history) == 1


@pytest.mark.parametrize("place", ["network", "criterion"])
def test_a_leaf_keeps_the_gradient_that_training_left_in_it(place):
    model, criterion, leaf = nn.Linear(FEATURES, 4), nn.MSELoss(), torch.randn(8, FEATURES).requires_grad_()
    target = torch.randn(8, 4).requires_grad_(place == "criterion")
    tuner = attached(model, criterion)
    loss = criterion(model(leaf), target)
    loss.backward()
    expected = [None if t.grad is None else t.grad.clone() for t in (leaf, target)]
    tuner.optimizer.step()
    assert len(tuner.history) == 1
    for found, value in zip((leaf.grad, target.grad), expected, strict=True):
        assert (found is None and value is None) or torch.equal(found, value)


def test_tensors_without_a_gradient_are_passed_on_themselves_and_twins_stay_twins():
    seen = []

    class Watchful(nn.Linear):
        def forward(self, input: Tensor, again: Tensor, mask: Tensor) -> Tensor:
            seen.append((input, again, mask))
            return super().forward(input) * mask

    model, criterion, mask = Watchful(FEATURES, 4), nn.MSELoss(), torch.ones(4)
    tuner = attached(model, criterion)
    leaf = torch.randn(8, FEATURES).requires_grad_()
    criterion(model(leaf, leaf, mask), torch.zeros(8, 4)).backward()
    tuner.optimizer.step()
    assert len(seen) > 1
    assert all(first is second and third is mask for first, second, third in seen)
    assert all(first is not leaf for first, _, _ in seen[1:])


def test_features_of_an_encoder_in_no_optimizer_or_another_one_are_constants():
    encoder, head, criterion = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES), nn.CrossEntropyLoss()
    tuner = attached(head, criterion)
    inputs, target = batch(0)
    features = encoder(inputs)
    criterion(head(features), target).backward()
    gradient, (weight, bias) = encoder.weight.grad, moved(head)
    before = gradient.clone()
    expected = F.cross_entropy(F.linear(features, weight, bias), target).item()
    tuner.optimizer.step()
    assert tuner.history[0].look_ahead_loss == pytest.approx(expected, rel=1e-5)
    assert torch.equal(encoder.weight.grad, before)


def test_features_of_an_encoder_in_the_same_optimizer_are_refused():
    encoder, head, criterion = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES), nn.CrossEntropyLoss()
    both = nn.Sequential(encoder, head)
    tuner = attached(head, criterion, both.parameters())
    inputs, target = batch(0)
    criterion(head(encoder(inputs)), target).backward()
    before = [p.detach().clone() for p in both.parameters()]
    with pytest.raises(apo.ReplayError, match=r"argument 1 of the network is .*: give apo a module that does both"):
        tuner.optimizer.step()
    assert_equal_bits(before, [p.detach() for p in both.parameters()])


def test_an_encoder_under_a_reentrant_checkpoint_is_refused_because_its_parameters_cannot_be_seen():
    from torch.utils.checkpoint import checkpoint

    encoder, head, criterion = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES), nn.CrossEntropyLoss()
    tuner = attached(head, criterion, [*encoder.parameters(), *head.parameters()])
    inputs, target = batch(0)
    features = checkpoint(encoder, inputs.requires_grad_(), use_reentrant=True)
    criterion(head(features), target).backward()
    with pytest.raises(apo.ReplayError, match="argument 1 of the network"):
        tuner.optimizer.step()


def test_a_network_that_is_fed_its_own_output_is_refused():
    model, criterion = nn.Linear(4, 4), nn.MSELoss()
    tuner = attached(model, criterion)
    criterion(model(input=model(torch.randn(8, 4))), torch.zeros(8, 4)).backward()
    with pytest.raises(apo.ReplayError, match="argument 'input' of the network"):
        tuner.optimizer.step()


def test_latent_codes_in_the_optimizer_are_refused():
    codes, head, criterion = nn.Parameter(torch.randn(8, 5)), nn.Linear(5, 4), nn.MSELoss()
    tuner = attached(head, criterion, [*head.parameters(), codes])
    criterion(head(codes), torch.zeros(8, 4)).backward()
    with pytest.raises(apo.ReplayError, match="argument 1 of the network is a parameter of the optimizer"):
        tuner.optimizer.step()


class Variational(nn.Module):
    def forward(self, output: Tensor, target: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
        return F.mse_loss(output, target) - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean()


@pytest.mark.parametrize("named", [False, True])
def test_an_argument_of_the_criterion_that_cannot_be_computed_again_is_refused_by_name(named):
    model, criterion = nn.Linear(FEATURES, 4), Variational()
    tuner = attached(model, criterion, discrepancy=apo.SquaredError())
    output = model(batch(0)[0])
    odd = F.dropout(output)
    rest = {"log_variance": odd} if named else {}
    criterion(output, torch.zeros(16, 4), torch.zeros(()), *([] if named else [odd]), **rest).backward()
    name = "'log_variance'" if named else "4"
    with pytest.raises(
        apo.ReplayError, match=f"argument {name} of the criterion was computed .*let the network return"
    ):
        tuner.optimizer.step()


def test_a_target_from_a_teacher_that_another_optimizer_trains_is_a_constant():
    model, teacher, criterion = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4), nn.MSELoss()
    tuner = attached(model, criterion)
    inputs = batch(0)[0]
    criterion(model(inputs), teacher(inputs)).backward()
    before = teacher.weight.grad.clone()
    tuner.optimizer.step()
    assert len(tuner.history) == 1
    assert torch.equal(teacher.weight.grad, before)


def test_a_parameter_of_the_optimizer_that_the_criterion_takes_moves_along():
    class Scaled(nn.Module):
        def forward(self, output: Tensor, target: Tensor, log_scale: Tensor) -> Tensor:
            return F.mse_loss(output, target) * (-log_scale).exp() + log_scale

    model, criterion, log_scale = nn.Linear(FEATURES, 4), Scaled(), nn.Parameter(torch.ones(()))
    tuner = attached(model, criterion, [*model.parameters(), log_scale], discrepancy=apo.SquaredError())
    inputs, target = batch(0)[0], torch.zeros(16, 4)
    criterion(model(inputs), target, log_scale).backward()
    everything = [*model.parameters(), log_scale]
    rate = torch.tensor(0.5).log().requires_grad_()
    weight, bias, scale = (p.detach() - rate.exp() * p.grad for p in everything)
    loss = criterion(F.linear(inputs, weight, bias), target, scale)
    (slope,) = torch.autograd.grad(loss, rate)
    tuner.optimizer.step()
    assert tuner.history[0].look_ahead_loss == pytest.approx(loss.item(), rel=1e-5)
    assert tuner.history[0].meta_gradient_norm == pytest.approx(abs(slope.item()), rel=1e-4)


@pytest.mark.parametrize("separately", [True, False])
def test_two_networks_may_share_a_criterion(separately):
    alone, run = Run("attached"), Run("attached")
    other = nn.Linear(FEATURES, CLASSES)
    for index in range(7):
        inputs, target = run.batch(index)
        run.optimizer.zero_grad()
        losses = [run.criterion(network(inputs), target) for network in (run.model, other)]
        for loss in losses if separately else [sum(losses)]:
            loss.backward()
        run.optimizer.step()
    assert list(alone.train(range(7)).tuner.history) == list(run.tuner.history)


def test_a_second_loss_that_cannot_be_repeated_is_refused_though_the_first_can_be():
    run = Run("attached")
    inputs, target = run.batch(0)
    output = run.model(inputs)
    (run.criterion(output, target) + run.criterion(F.dropout(output), target)).backward()
    with pytest.raises(apo.ReplayError, match=r"made of an output of the network .*into the criterion"):
        run.optimizer.step()


def test_the_class_of_a_criterion_is_not_a_criterion():
    with pytest.raises(TypeError, match="got the class CrossEntropyLoss: pass an instance of it"):
        apo.criterion(nn.CrossEntropyLoss)


def test_gradients_by_torch_func_leave_training_alone():
    plain, run = Run("attached"), Run("attached")
    inputs, target = run.batch(0)

    def loss(parameters: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return run.criterion(torch.func.functional_call(run.model, parameters, (one[None],)), label[None])

    parameters = {name: p.detach() for name, p in run.model.named_parameters()}
    torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, inputs, target)
    assert list(run.train(range(4)).tuner.history) == list(plain.train(range(4)).tuner.history)
