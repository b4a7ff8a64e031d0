"""An optimizer must move the network that it is attached to; wrappers and partial overlaps are fine."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import apo


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def train(optimizer, model, criterion, steps=3):
    """Train a little through apo, and return the tuner."""
    tuner = apo.attach(optimizer, model, criterion, interval=1)
    for _ in range(steps):
        optimizer.zero_grad()
        criterion(model(torch.randn(8, 6)), torch.randint(3, (8,))).backward()
        optimizer.step()
    assert len(tuner.history) == steps
    return tuner


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


@pytest.mark.parametrize("door", ["attach", "APO"])
def test_parameters_of_another_network_are_refused(door):
    build = getattr(apo, door)
    sentence = r"optimizer must hold parameters of the model, got 4 tensors .* of Sequential: build it from model.param"
    with pytest.raises(ValueError, match=sentence):
        build(sgd(network().parameters()), network(), nn.CrossEntropyLoss())


def test_a_copy_of_the_network_is_refused():
    """A network that was copied or built again after the optimizer: the usual way to get here."""
    model = network()
    optimizer = sgd(model.parameters())
    with pytest.raises(ValueError, match="optimizer must hold parameters of the model"):
        apo.attach(optimizer, copy.deepcopy(model), nn.CrossEntropyLoss())


def test_a_preconditioner_of_another_network_is_refused():
    with pytest.raises(ValueError, match="optimizer must hold parameters of the model"):
        apo.attach(apo.Kronecker(network()), network(), nn.CrossEntropyLoss())


def test_a_refused_optimizer_can_be_attached_to_its_own_network():
    model = network()
    optimizer = sgd(model.parameters())
    with pytest.raises(ValueError, match="parameters of the model"):
        apo.attach(optimizer, network(), nn.CrossEntropyLoss())
    assert type(optimizer.param_groups[0]) is dict
    train(optimizer, model, nn.CrossEntropyLoss())


def test_adapters_on_a_frozen_network_are_accepted():
    model = network()
    for p in model[0].parameters():
        p.requires_grad_(False)
    train(sgd(model[2].parameters()), model, nn.CrossEntropyLoss())


def test_a_learnable_weight_of_the_loss_beside_the_network_is_accepted():
    model, temperature = network(), nn.Parameter(torch.ones(()))
    criterion = apo.criterion(lambda output, y: nn.functional.cross_entropy(output * temperature, y))
    optimizer = sgd([*model.parameters(), temperature])
    tuner = apo.attach(optimizer, model, criterion, interval=1, discrepancy=apo.CategoricalKL())
    criterion(model(torch.randn(8, 6)), torch.randint(3, (8,))).backward()
    optimizer.step()
    assert len(tuner.history) == 1


def test_parameters_of_the_criterion_alone_are_accepted():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, y):
            return nn.functional.cross_entropy(self.scale * output, y)

    criterion = Scaled()
    apo.attach(sgd(criterion.parameters()), network(), criterion, discrepancy=apo.CategoricalKL()).detach()


def test_a_compiled_network_is_accepted():
    model = network()
    apo.attach(sgd(model.parameters()), torch.compile(model, backend="eager"), nn.CrossEntropyLoss()).detach()
    compiled = torch.compile(network(), backend="eager")
    apo.attach(sgd(compiled.parameters()), compiled, nn.CrossEntropyLoss()).detach()


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_weights_are_accepted(parametrize):
    model = nn.Sequential(parametrize(nn.Linear(6, 3)))
    train(sgd(model.parameters()), model, nn.CrossEntropyLoss())


def test_a_data_parallel_network_is_accepted():
    model = network()
    apo.attach(sgd(model.parameters()), nn.DataParallel(model), nn.CrossEntropyLoss()).detach()
