"""The unrolled meta-gradient against finite differences and against hand-written algebra."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apo.discrepancy import Bregman, CategoricalKL, SquaredError
from apo.reference import batch_gradient, parameters_of, proximal_objective, unrolled_meta_gradient, updates


def network(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


def batches(seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2, 8, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (2, 8), generator=generator)
    return (inputs[0], labels[0]), (inputs[1], labels[1])


def setting(**changes):
    batch, fsd_batch = batches()
    arguments = {
        "loss": F.cross_entropy,
        "batch": batch,
        "fsd_batch": fsd_batch,
        "discrepancy": CategoricalKL(),
        "fsd_weight": 0.7,
        "wsd_weight": 0.2,
        "loss_randomness": 3,
        "fsd_randomness": 4,
    }
    return {**arguments, **changes}


def adam_step(model, arguments):
    gradient = batch_gradient(model, loss=arguments["loss"], batch=arguments["batch"], randomness=3)

    def step(theta, phi):
        return {name: updates.adam(theta[name], gradient[name], {}, lr=phi["log_lr"].exp(), eps=1e-3) for name in theta}

    return step


DIVERGENCES = [CategoricalKL(), SquaredError(), Bregman(F.cross_entropy)]


@pytest.mark.parametrize("weight_decay", [0.0, 0.3, {"0.weight": 0.5, "4.bias": 0.1}], ids=repr)
@pytest.mark.parametrize("discrepancy", DIVERGENCES, ids=lambda rho: type(rho).__name__)
def test_meta_gradient_agrees_with_finite_differences(discrepancy, weight_decay):
    model = network()
    arguments = setting(discrepancy=discrepancy, weight_decay=weight_decay)
    step, theta = adam_step(model, arguments), parameters_of(model)

    def objective(log_lr):
        return proximal_objective(model, theta, step(theta, {"log_lr": log_lr}), **arguments).total

    point = torch.tensor(-2.0, dtype=torch.float64)
    terms, found = unrolled_meta_gradient(model, step, {"log_lr": point}, **arguments)
    expected = (objective(point + 1e-5) - objective(point - 1e-5)) / 2e-5
    torch.testing.assert_close(found["log_lr"], expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(terms.total, objective(point))


def test_meta_gradient_is_the_pull_back_of_one_ordinary_gradient():
    model, arguments = network(), setting(weight_decay=0.1)
    step, phi = adam_step(model, arguments), {"log_lr": torch.tensor(-2.0, dtype=torch.float64)}
    _, found = unrolled_meta_gradient(model, step, phi, **arguments)
    theta = parameters_of(model)
    moved = {name: value.detach().requires_grad_() for name, value in step(theta, phi).items()}
    terms = proximal_objective(model, theta, moved, **arguments)
    cotangents = torch.autograd.grad(terms.total, list(moved.values()))
    expected = sum((h * (moved[n] - theta[n])).sum() for n, h in zip(moved, cotangents, strict=True))
    torch.testing.assert_close(found["log_lr"], expected.detach(), rtol=1e-12, atol=1e-14)


def test_terms_are_what_the_model_itself_computes():
    model, arguments = network().eval(), setting(weight_decay={"4.bias": 2.0})
    theta = parameters_of(model)
    moved = {name: value * 1.1 for name, value in theta.items()}
    terms = proximal_objective(model, theta, moved, **arguments)
    twin = copy.deepcopy(model)
    twin.load_state_dict(moved, strict=False)
    (x, y), (fsd_x, _) = arguments["batch"], arguments["fsd_batch"]
    torch.testing.assert_close(terms.loss, (F.cross_entropy(twin(x), y) + moved["4.bias"].square().sum()).detach())
    torch.testing.assert_close(terms.fsd, CategoricalKL()(twin(fsd_x), model(fsd_x)).detach())
    torch.testing.assert_close(terms.wsd, sum(0.005 * value.square().sum() for value in theta.values()))
    torch.testing.assert_close(terms.total, terms.loss + 0.7 * terms.fsd + 0.2 * terms.wsd)


def test_fsd_forwards_share_their_dropout_masks():
    model = network()
    theta = parameters_of(model)
    for randomness in (None, 5, torch.get_rng_state()):
        terms = proximal_objective(model, theta, theta, **setting(fsd_randomness=randomness))
        assert terms.fsd.item() == 0


def test_loss_randomness_decides_the_dropout_masks_of_the_loss():
    model = network()
    theta = parameters_of(model)
    torch.manual_seed(3)
    expected = F.cross_entropy(copy.deepcopy(model)(batches()[0][0]), batches()[0][1]).detach()
    torch.testing.assert_close(proximal_objective(model, theta, theta, **setting()).loss, expected)
    other = proximal_objective(model, theta, theta, **setting(loss_randomness=9)).loss
    assert not torch.isclose(other, expected)


def test_model_and_random_stream_are_left_untouched():
    model, arguments = network(), setting()
    step = adam_step(model, arguments)
    before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    unrolled_meta_gradient(model, step, {"log_lr": torch.tensor(-2.0, dtype=torch.float64)}, **arguments)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), stream)
    assert model.training


def test_batch_gradient_is_what_backward_gives():
    model, (batch, _) = network().eval(), batches()
    found = batch_gradient(model, loss=F.cross_entropy, batch=batch)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_frozen_parameters_and_keyword_inputs():
    model = nn.Bilinear(2, 3, 1).double()
    model.bias.requires_grad_(False)
    x = {"input1": torch.ones(5, 2).double(), "input2": torch.ones(5, 3).double()}
    y = torch.zeros(5, 1).double()
    assert list(batch_gradient(model, loss=F.mse_loss, batch=(x, y))) == ["weight"]
    positional = batch_gradient(model, loss=F.mse_loss, batch=(tuple(x.values()), y))
    torch.testing.assert_close(batch_gradient(model, loss=F.mse_loss, batch=(x, y)), positional)


def test_unused_phi_gets_a_zero_gradient():
    model = network()
    phi = {"log_lr": torch.tensor(-2.0, dtype=torch.float64), "idle": torch.ones(2, dtype=torch.float64)}
    _, found = unrolled_meta_gradient(model, adam_step(model, setting()), phi, **setting())
    assert torch.equal(found["idle"], torch.zeros(2, dtype=torch.float64))
    assert found["log_lr"] != 0
