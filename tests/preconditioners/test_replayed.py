"""On a GPU the product P g is replayed as a CUDA graph, with the results of the operations that it consists of.

Without a GPU the graphs are imitated, so that all but the recording itself is tested everywhere.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from apo.preconditioners import Eigenbasis, Kronecker, replayed
from apo.preconditioners.bundled import Bundled
from apo.preconditioners.replayed import Replayed, pays


class Imitation:
    """Computes again at every call, but like a graph it reads its own inputs and overwrites its own results."""

    def __init__(self, function, inputs):
        self._function = function
        self._inputs = [tensor.clone() for tensor in inputs]
        self.results = None

    def __call__(self, inputs=()):
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        found = self._function(self._inputs)
        if self.results is None:
            self.results = found
        for own, new in zip(tensors_in(self.results), tensors_in(found), strict=True):
            own.copy_(new)
        return self.results


def tensors_in(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for value in values for tensor in tensors_in(value)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr(replayed, "_Graph", Imitation)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return request.param


def network(device="cuda"):
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 5)).to(device)


def pair(device, structure=Kronecker, **options):
    """Returns two equal optimizers: one that replays, one that does not."""
    optimizers = []
    for kind in (Replayed, Bundled):
        optimizer = structure(network(device), lr=0.1, **options)
        generator = torch.Generator(device).manual_seed(1)
        for factor in optimizer.factors():
            factor.add_(torch.randn(factor.shape, device=device, generator=generator), alpha=0.1)
        optimizer._product = kind(optimizer.layers)
        optimizers.append(optimizer)
    return optimizers


def give_gradients(optimizers, seed, without=()):
    for optimizer in optimizers:
        generator = torch.Generator(optimizer._parameters()[0].device).manual_seed(seed)
        for index, p in enumerate(optimizer._parameters()):
            gradient = torch.randn(p.shape, device=p.device, generator=generator)
            p.grad = None if index in without else gradient


def assert_same(optimizers):
    one, other = optimizers
    for p, q in zip(one._parameters(), other._parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def meta_step(optimizer):
    """Moves the factors along their gradients."""
    displacement = optimizer.displacement()
    kept = [value.clone() for value in displacement]
    gradients = optimizer.pull_back([torch.ones_like(value) for value in displacement])
    for factor, gradient in zip(optimizer.factors(), gradients, strict=True):
        factor.sub_(gradient, alpha=1e-3)
    for value, before in zip(displacement, kept, strict=True):
        assert torch.equal(value, before)
    return displacement, gradients


@pytest.mark.parametrize("conv", ["matrix", "factored"])
def test_steps_and_meta_steps_are_the_same(conv, device):
    optimizers = pair(device, conv=conv, momentum=0.9, weight_decay=0.1)
    for step in range(12):
        give_gradients(optimizers, seed=step)
        if step % 2:
            for ours, theirs in zip(*(meta_step(optimizer) for optimizer in optimizers), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(*(optimizer.summary() for optimizer in optimizers), rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(optimizers)
    names = {"directions", "displacements", "pull_back", "mean_eigenvalues"}
    assert set(optimizers[0]._product._graphs) == names


@pytest.mark.parametrize("decoupled", [False, True])
def test_statistics_and_bases_are_the_same(decoupled, device):
    options = {"momentum": 0.9, "weight_decay": 0.1, "decoupled_weight_decay": decoupled, "refresh_interval": 4}
    optimizers = pair(device, Eigenbasis, **options)
    for step in range(20):
        give_gradients(optimizers, seed=step)
        if step % 2:
            for ours, theirs in zip(*(meta_step(optimizer) for optimizer in optimizers), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
        one, other = ([layer.block.statistics["V"] for layer in optimizer.layers] for optimizer in optimizers)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        assert_same(optimizers)
    assert "observe" in optimizers[0]._product._graphs


@pytest.mark.parametrize("structure", [Kronecker, Eigenbasis])
def test_whatever_changes_between_steps_is_seen(structure, device):
    optimizers = pair(device, structure, weight_decay=0.1)
    state = None
    for step in range(24):
        give_gradients(optimizers, seed=step, without={0, 3} if 8 <= step < 13 else ())
        if step == 5:
            state = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        for index, optimizer in enumerate(optimizers):
            if step == 7:
                optimizer.rescale(0.5)
            if step == 14:
                optimizer.param_groups[0]["lr"] *= 0.1
                optimizer.param_groups[0]["weight_decay"] = 0.0
            if step == 18:
                optimizer.load_state_dict(state[index])
            optimizer.step()
        assert_same(optimizers)
    assert optimizers[0]._product._graphs


@pytest.mark.gpu
def test_only_networks_on_a_gpu_are_replayed():
    model = network()
    assert isinstance(Kronecker(model, lr=0.1)._product, Replayed)
    assert not pays(Kronecker(model.cpu(), lr=0.1).layers)


@pytest.mark.gpu
def test_a_copy_of_the_optimizer_replays_its_own_graph():
    model = network()
    optimizer = Kronecker(model, lr=0.1)
    for step in range(6):
        give_gradients([optimizer], seed=step)
        optimizer.step()
    twin = copy.deepcopy((model, optimizer))[1]
    for step in range(6):
        give_gradients([optimizer, twin], seed=step)
        optimizer.step()
        twin.step()
    assert_same([optimizer, twin])
