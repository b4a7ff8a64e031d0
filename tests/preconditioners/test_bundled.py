"""Layers that are computed together: the same numbers as one by one, in fewer operations."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from tests.preconditioners.conformance import randomised
from tests.preconditioners.test_step import assert_same_weights, train
from tests.preconditioners.zoo import ZOO, backward, build
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from apo.preconditioners import Diagonal, Kronecker, bundled
from apo.preconditioners.bundled import Bundled, bundle_layers
from apo.preconditioners.ownership import LayerByLayer


def repeated(layers: int = 3) -> nn.Module:
    """Returns a network of equal layers: convolutions with and without bias, norms, linear layers."""
    stages = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh()) for _ in range(layers)]
    stages += [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.GroupNorm(1, 4)) for _ in range(layers)]
    stages += [nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 1, groups=2)) for _ in range(layers)]
    return nn.Sequential(*stages, nn.Flatten(), *(nn.Linear(36, 36) for _ in range(layers))).double()


def batch() -> torch.Tensor:
    return torch.randn(2, 4, 3, 3, dtype=torch.float64)


def scrambled(model: nn.Module, final=Kronecker, **options):
    optimizer = final(model, lr=0.3, **options)
    for layer in optimizer.layers:
        randomised(layer.block)
    return optimizer


def assert_as_one_by_one(optimizer) -> None:
    """Directions, displacements, pull-backs and eigenvalues of both ways agree."""
    together, singly = optimizer._product, LayerByLayer(optimizer.layers, optimizer.ownership)
    assert isinstance(together, Bundled)
    groups, gradients = optimizer.param_groups, optimizer._gradients()
    for look_ahead in (False, True):
        (found, ours), (expected, theirs) = (way.multiply(groups, gradients, look_ahead) for way in (together, singly))
        assert set(found) == set(expected) and found
        torch.testing.assert_close([found[p] for p in expected], list(expected.values()), rtol=1e-12, atol=1e-12)
    cotangents = {p: torch.randn_like(p) for p in expected}
    pulled, reference = together.pull_back(ours, cotangents), singly.pull_back(theirs, cotangents)
    for name, factors in pulled.items():
        for key, gradient in factors.items():
            other = reference[name][key] if name in reference else torch.zeros_like(gradient)
            torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)
    assert set(reference) <= set(pulled)
    assert list(together.mean_eigenvalues()) == [layer.name for layer in optimizer.layers]
    torch.testing.assert_close(together.mean_eigenvalues(), singly.mean_eigenvalues(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"conv": "factored"}, {"max_dim": 5}], ids=["matrix", "factored", "short"])
def test_equal_layers_together_are_as_one_by_one(options):
    model = repeated()
    optimizer = scrambled(model, weight_decay=0.1, **options)
    backward(model, batch())
    assert len(optimizer._product._bundles) < len(optimizer.layers) / 3
    assert_as_one_by_one(optimizer)


@pytest.mark.parametrize("final", [Kronecker, Diagonal])
@pytest.mark.parametrize("name", ZOO)
def test_every_model_together_is_as_one_by_one(name, final):
    model, x = build(name)
    optimizer = scrambled(model, final)
    backward(model, x)
    assert_as_one_by_one(optimizer)


def test_missing_gradients_and_groups_of_different_rates_are_as_one_by_one():
    model = repeated()
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2], "lr": 0.5, "weight_decay": 0.2}, {"params": parameters[1::2], "lr": 0.1}]
    optimizer = scrambled(model, params=groups)
    backward(model, batch())
    for p in [*parameters[::5], *model[0].parameters()]:  # of the first layers nothing is left
        p.grad = None
    assert_as_one_by_one(optimizer)


@pytest.mark.parametrize("conv", ["matrix", "factored"])
def test_channels_last_weights_move_like_others_and_directions_lie_as_they_do(conv):
    """Only tensors of equal strides go through a list of operations in one launch."""
    plain, x = repeated(), batch()
    other = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    optimizers = [Kronecker(model, lr=0.1, conv=conv, momentum=0.9) for model in (plain, other)]
    torch.manual_seed(5)
    for one, two in zip(*(optimizer.factors() for optimizer in optimizers), strict=True):
        two.copy_(one.copy_(torch.randn_like(one) / len(one) ** 0.5))
    for model, optimizer in zip((plain, other), optimizers, strict=True):
        train(model, optimizer, x, steps=2)
        for p, direction in optimizer._product.multiply(optimizer.param_groups, optimizer._gradients())[0].items():
            assert direction.stride() == p.stride()
    assert_same_weights(plain, other)


def test_bundles_are_no_larger_than_they_may_be(monkeypatch):
    monkeypatch.setattr(bundled, "_LARGEST", 2 * 36 * 37)
    made = bundle_layers(Kronecker(nn.Sequential(*(nn.Linear(36, 36) for _ in range(5)))).layers)
    assert [len(bundle.layers) for bundle in made] == [2, 2, 1]
    assert made[-1].block is made[-1].layers[0].block


# --- whose memory it is ---


def test_the_layers_factors_stay_what_a_meta_optimizer_holds():
    model = repeated()
    layers = Kronecker(model).layers
    held = [factor for layer in layers for factor in layer.block.factors.values()]
    before = [factor.clone() for factor in held]
    made = bundle_layers(layers)
    assert all(a is b for a, b in zip(held, (f for la in layers for f in la.block.factors.values()), strict=True))
    torch.testing.assert_close(held, before, rtol=0, atol=0)
    for factor in held:
        factor.grad = torch.ones_like(factor)
    torch.optim.SGD(held, lr=1.0, foreach=True).step()
    for bundle in made:
        assert bundle.is_current()
        for key, joint in bundle.block.factors.items():
            for layer, part in zip(bundle.layers, bundle.split(joint), strict=True):
                assert torch.equal(part, layer.block.factors[key])
    torch.testing.assert_close(held, [b - 1 for b in before], rtol=0, atol=0)


def through_pickle(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


def through_torch_save(optimizer):
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
def test_copies_compute_with_their_own_factors(duplicate):
    model = repeated(2)
    optimizer = scrambled(model)
    backward(model, batch())
    meta = torch.optim.SGD(optimizer.factors(), lr=0.5)
    copied, copied_meta = duplicate((optimizer, meta))
    (group,) = copied_meta.param_groups
    assert all(a is b for a, b in zip(group["params"], copied.factors(), strict=True))
    for factor in group["params"]:
        factor.grad = factor.clone()
    copied_meta.step()  # halves the factors, so that a diagonal P is a quarter of the original's
    for p, q in zip(copied._parameters(), optimizer._parameters(), strict=True):
        p.grad = q.grad.clone()
    assert all(bundle.is_current() for bundle in copied._product._bundles)
    assert_as_one_by_one(copied)
    assert_as_one_by_one(optimizer)
    diagonal = next(i for i, p in enumerate(optimizer.moved()) if p is model[0][1].weight)
    torch.testing.assert_close(copied.displacement()[diagonal], optimizer.displacement()[diagonal] / 4)


def test_an_exchanged_factor_is_used():
    model = repeated(2)
    optimizer = scrambled(model)
    backward(model, batch())
    block = optimizer.layers[0].block
    block.factors = {key: factor.clone().mul_(2) for key, factor in block.factors.items()}
    optimizer.layers[1].block.factors["s"].data = torch.zeros(4, dtype=torch.float64)
    assert_as_one_by_one(optimizer)


def test_an_exchanged_plan_is_used():
    model = repeated(2)
    optimizer = scrambled(model)
    backward(model, batch())
    fresh = Kronecker(model, lr=0.3).layers
    optimizer.layers = [fresh[0], *optimizer.layers[1:]]
    assert_as_one_by_one(optimizer)
    torch.testing.assert_close(optimizer.displacement()[0], -0.3 * model[0][0].weight.grad)


# --- what it costs ---


class Counted(TorchDispatchMode):
    """Counts the operations that do not only look at memory in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("conv", ["matrix", "factored"])
def test_the_number_of_operations_does_not_grow_with_the_number_of_equal_layers(conv):
    counts = []
    for layers in (2, 5):
        model = repeated(layers)
        optimizer = Kronecker(model, conv=conv, momentum=0.9, weight_decay=0.1, clip=1.0)
        backward(model, batch())
        optimizer.step()
        with Counted() as step:
            optimizer.step()
        with Counted() as meta:
            optimizer.pull_back(optimizer.displacement())
        counts.append((step.count, meta.count))
    assert counts[0] == counts[1]
