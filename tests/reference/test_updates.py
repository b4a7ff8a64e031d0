"""Each textbook step against torch's optimizer, over several steps in float64."""

import copy

import pytest
import torch

from apo.reference import updates

CASES = {
    "sgd": ("SGD", updates.sgd, {}),
    "sgd-decay": ("SGD", updates.sgd, {"weight_decay": 0.1}),
    "sgd-momentum": ("SGD", updates.sgd, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd-nesterov": ("SGD", updates.sgd, {"momentum": 0.9, "nesterov": True}),
    "rmsprop": ("RMSprop", updates.rmsprop, {}),
    "rmsprop-momentum": ("RMSprop", updates.rmsprop, {"momentum": 0.9, "weight_decay": 0.1, "alpha": 0.9}),
    "rmsprop-centered": ("RMSprop", updates.rmsprop, {"centered": True, "momentum": 0.5}),
    "adam": ("Adam", updates.adam, {"weight_decay": 0.1}),
    "adam-amsgrad": ("Adam", updates.adam, {"amsgrad": True, "betas": (0.8, 0.5)}),
    "adamw": ("AdamW", updates.adamw, {"weight_decay": 0.2}),
    "nadam": ("NAdam", updates.nadam, {"weight_decay": 0.1}),
    "nadam-decoupled": ("NAdam", updates.nadam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamax": ("Adamax", updates.adamax, {"weight_decay": 0.1}),
    "muon": ("Muon", updates.muon, {"weight_decay": 0.3}),
    "muon-plain": ("Muon", updates.muon, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
}


@pytest.mark.parametrize("shape", [(5, 3), (3, 5)], ids=["tall", "wide"])
@pytest.mark.parametrize("name", CASES)
def test_step_agrees_with_torch(name, shape):
    optimizer_name, update, options = CASES[name]
    if not hasattr(torch.optim, optimizer_name):
        pytest.skip(f"this torch has no {optimizer_name}")
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))
    optimizer = getattr(torch.optim, optimizer_name)([weights], lr=0.05, **options)
    for _ in range(4):
        weights.grad = torch.randn(*shape, generator=generator, dtype=torch.float64)
        state = copy.deepcopy(dict(optimizer.state[weights])) if weights in optimizer.state else {}
        before = {key: copy.deepcopy(value) for key, value in state.items()}
        expected = update(weights.detach().clone(), weights.grad, state, lr=0.05, **options)
        assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(before[key])) for key in before)
        optimizer.step()
        torch.testing.assert_close(weights.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_step_is_linear_and_differentiable_in_the_rate(name):
    _, update, options = CASES[name]
    theta, grad = torch.eye(3, dtype=torch.float64), torch.ones(3, 3, dtype=torch.float64).tril()
    rate = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def moved(lr):
        return (update(theta, grad, {}, lr=lr, **options) - theta).square().sum() ** 0.5

    (slope,) = torch.autograd.grad(moved(rate), rate)
    torch.testing.assert_close(slope, moved(torch.ones((), dtype=torch.float64)))


def test_preconditioned_step_multiplies_the_flat_gradient():
    theta, grad = torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    matrix = torch.arange(16.0).reshape(4, 4)
    expected = -0.5 * (matrix @ torch.tensor([1.0, 2.0, 3.0, 4.0])).reshape(2, 2)
    torch.testing.assert_close(updates.preconditioned(theta, grad, {}, preconditioner=matrix, lr=0.5), expected)
