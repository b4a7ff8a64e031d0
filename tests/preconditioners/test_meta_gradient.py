"""Displacement and pull-back of whole optimizers, against the dense P and autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.preconditioners.conformance import randomised
from tests.preconditioners.zoo import ZOO, backward, build
from torch import Tensor, nn

from apo.preconditioners import Diagonal, Eigenbasis, Full, Kronecker, Preconditioner

STRUCTURES: dict[str, Callable[..., Preconditioner]] = {
    "full": Full,
    "diagonal": Diagonal,
    "kronecker": Kronecker,
    "kronecker factored": lambda *args, **kw: Kronecker(*args, conv="factored", **kw),
    "kronecker short": lambda *args, **kw: Kronecker(*args, max_dim=3, **kw),
    "eigenbasis": Eigenbasis,
    "eigenbasis factored": lambda *args, **kw: Eigenbasis(*args, conv="factored", **kw),
    "eigenbasis short": lambda *args, **kw: Eigenbasis(*args, max_dim=3, **kw),
}


def scramble(optimizer: Preconditioner) -> None:
    for layer in optimizer.layers:
        randomised(layer.block)


def dense_displacement(optimizer: Preconditioner) -> dict[Tensor, Tensor]:
    """Returns -P g from the dense matrices, for parameters that have a gradient; differentiable in the factors."""
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    found = {}
    for layer in optimizer.layers:
        if all(p.grad is None for p in layer.params):
            continue
        decays = [0 if groups[p]["decoupled_weight_decay"] else groups[p]["weight_decay"] for p in layer.params]
        gradients = [
            None if p.grad is None else p.grad + decay * p.detach()
            for p, decay in zip(layer.params, decays, strict=True)
        ]
        vector = layer.view.gather(gradients).reshape(-1)
        moved = -(optimizer.dense_preconditioner(layer.name) @ vector).reshape(layer.view.shape)
        for p, part in zip(layer.params, layer.view.scatter(moved), strict=True):
            if p.grad is not None:
                found[p] = part
    return found


def assert_meta_gradient_is_right(optimizer: Preconditioner) -> None:
    moved, found = optimizer.moved(), optimizer.displacement()
    cotangents = [torch.randn_like(p) for p in moved]
    pulled = optimizer.pull_back(cotangents)
    for factor in optimizer.factors():
        factor.requires_grad_()
    dense = dense_displacement(optimizer)
    assert list(dense) and set(dense) == set(moved)
    for p, displacement in zip(moved, found, strict=True):
        torch.testing.assert_close(displacement, dense[p].detach(), rtol=1e-11, atol=1e-11)
    inner = torch.stack([(c * dense[p]).sum() for p, c in zip(moved, cotangents, strict=True)]).sum()
    expected = torch.autograd.grad(inner, optimizer.factors(), materialize_grads=True)
    for one, other in zip(pulled, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ZOO)
def test_meta_gradient_of_every_structure_on_every_model(name, structure):
    model, batch = build(name)
    optimizer = STRUCTURES[structure](model, lr=0.3, weight_decay=0.1)
    scramble(optimizer)
    backward(model, batch)
    assert len(optimizer.moved()) == len(list(model.parameters()))
    assert_meta_gradient_is_right(optimizer)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_meta_gradient_with_groups_of_different_rates_and_decays(structure):
    model, batch = build("mlp")
    groups = [
        {"params": [model[0].weight, model[2].weight], "lr": 0.5, "weight_decay": 0.2},
        {"params": [model[0].bias], "lr": 0.01},
        {"params": list(model[3].parameters()), "weight_decay": 0.1, "decoupled_weight_decay": True},
    ]
    optimizer = STRUCTURES[structure](model, lr=0.1, params=groups)
    scramble(optimizer)
    backward(model, batch)
    assert [p.shape for p in optimizer.moved()] == [p.shape for group in groups for p in group["params"]]
    assert_meta_gradient_is_right(optimizer)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_p_stays_positive_semi_definite_with_groups_of_different_rates(structure):
    model, _ = build("mlp")
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "lr": 10.0},
        {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 1e-3},
    ]
    optimizer = STRUCTURES[structure](model, params=groups)
    scramble(optimizer)
    for dense in optimizer.to_dense().values():
        torch.testing.assert_close(dense, dense.mT, rtol=0, atol=1e-12)
        assert torch.linalg.eigvalsh(dense).min() >= -1e-12 * dense.abs().max()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_meta_gradient_when_some_gradients_are_missing(structure):
    model, batch = build("mlp")
    optimizer = STRUCTURES[structure](model, lr=0.3)
    scramble(optimizer)
    backward(model, batch)
    model[0].bias.grad = None
    model[2].weight.grad = None
    assert len(optimizer.moved()) == 3
    assert_meta_gradient_is_right(optimizer)


def test_blocks_without_gradient_pull_back_zeros():
    model, batch = build("mlp")
    optimizer = Kronecker(model)
    backward(model, batch)
    model[2].weight.grad = None
    pulled = optimizer.pull_back([torch.ones_like(d) for d in optimizer.displacement()])
    zero = [not gradient.any() for gradient in pulled]
    idle = [layer.name == "2.weight" for layer in optimizer.layers for _ in layer.block.factors]
    assert zero == idle


def test_look_ahead_ignores_scale_momentum_clip_and_schedule():
    model, batch = build("mlp")
    optimizer = Kronecker(model, lr=0.3, scale=0.5, momentum=0.9, clip=1e-3)
    backward(model, batch)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-4
    backward(model, batch)
    for p, displacement in zip(optimizer.moved(), optimizer.displacement(), strict=True):
        torch.testing.assert_close(displacement, -0.3 * p.grad, rtol=1e-13, atol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_pull_back_remembers_gradients_and_weights_of_the_displacement(weight_decay):
    model, batch = build("mlp")
    optimizer = Kronecker(model, weight_decay=weight_decay)
    scramble(optimizer)
    backward(model, batch)
    cotangents = [torch.randn_like(d) for d in optimizer.displacement()]
    expected = optimizer.pull_back(cotangents)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
            p.grad.mul_(7.0)
    found = optimizer.pull_back(cotangents)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    model.zero_grad(set_to_none=True)
    found = optimizer.pull_back(cotangents)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_pull_back_asks_for_a_displacement_and_for_as_many_cotangents():
    model, batch = build("mlp")
    optimizer = Kronecker(model)
    backward(model, batch)
    with pytest.raises(RuntimeError, match=r"call displacement\(\) first"):
        optimizer.pull_back([])
    optimizer.displacement()
    with pytest.raises(ValueError, match=r"cotangents must have 5 entries, .*, got 0"):
        optimizer.pull_back([])
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"call displacement\(\) first"):
        optimizer.pull_back([])


def test_following_the_meta_gradient_lowers_an_ill_conditioned_quadratic():
    """The pull-back is what learns: a few meta-steps make one preconditioned step far better than the first."""
    curvature = torch.tensor([1.0, 100.0], dtype=torch.float64)
    theta = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = Full(theta, lr=0.01)
    (factor,) = optimizer.factors()
    meta, losses = torch.optim.Adam([factor], lr=0.03), []
    theta.grad = curvature * theta.detach()
    for _ in range(300):
        (displacement,) = optimizer.displacement()
        ahead = theta.detach() + displacement
        losses.append((0.5 * curvature * ahead.square()).sum())
        (factor.grad,) = optimizer.pull_back([curvature * ahead])
        meta.step()
    assert losses[-1] < 1e-3 * losses[0]
