"""Dense curvature matrices: agreements between definitions that share no code."""

import pytest
import torch
from torch.nn import functional as F

from apo.discrepancy import BernoulliKL, Bregman, CategoricalKL, GaussianKL, SquaredError
from apo.reference import fisher, flatten, fsd_hessian, ggn, hessian, unflatten


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


INPUTS, THETA = normal(6, 2, seed=1), normal(15, seed=2) / 2
LABELS = torch.tensor([0, 1, 2, 2, 1, 0])
REAL = normal(6, 3, seed=3)


def mlp(theta, x):
    """2 -> 3 tanh -> 3, 15 weights."""
    return torch.tanh(x @ theta[:6].reshape(2, 3)) @ theta[6:].reshape(3, 3)


def linear(theta, x):
    return x @ theta[:6].reshape(2, 3)


def test_hessian_agrees_with_finite_differences_of_the_gradient():
    def cost(theta):
        return F.cross_entropy(mlp(theta, INPUTS), LABELS)

    def gradient(theta):
        theta = theta.detach().requires_grad_()
        return torch.autograd.grad(cost(theta), theta)[0]

    steps = 1e-5 * torch.eye(15, dtype=torch.float64)
    expected = torch.stack([(gradient(THETA + e) - gradient(THETA - e)) / 2e-5 for e in steps])
    torch.testing.assert_close(hessian(cost, THETA), expected, rtol=1e-6, atol=1e-8)


def test_ggn_is_the_hessian_of_a_linear_model():
    theta = THETA[:6]
    expected = hessian(lambda u: F.cross_entropy(linear(u, INPUTS), LABELS), theta)
    torch.testing.assert_close(ggn(linear, F.cross_entropy, theta, INPUTS, LABELS), expected)


def test_ggn_is_the_hessian_of_the_linearised_model():
    jacobian = torch.autograd.functional.jacobian(lambda u: mlp(u, INPUTS), THETA)

    def cost(u):
        return F.mse_loss(mlp(THETA, INPUTS) + jacobian @ (u - THETA), REAL)

    torch.testing.assert_close(ggn(mlp, F.mse_loss, THETA, INPUTS, REAL), hessian(cost, THETA))


FAMILIES = {
    "categorical": (CategoricalKL(), {"distribution": "categorical"}),
    "bernoulli": (BernoulliKL(), {"distribution": "bernoulli"}),
    "gaussian": (GaussianKL(variance=0.4), {"distribution": "gaussian", "variance": 0.4}),
    "unit gaussian": (SquaredError(), {"distribution": "gaussian"}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_hessian_of_a_kl_discrepancy_is_the_fisher(name):
    discrepancy, options = FAMILIES[name]
    found = fsd_hessian(mlp, THETA, INPUTS, discrepancy)
    torch.testing.assert_close(found, fisher(mlp, THETA, INPUTS, **options))


def test_fisher_of_categorical_outputs_is_the_mean_of_sampled_score_products():
    probabilities = mlp(THETA, INPUTS).softmax(dim=1)

    def log_probability(theta, n, label):
        return mlp(theta, INPUTS).log_softmax(dim=1)[n, label]

    expected = torch.zeros(15, 15, dtype=torch.float64)
    for n in range(6):
        for label in range(3):
            theta = THETA.clone().requires_grad_()
            (score,) = torch.autograd.grad(log_probability(theta, n, label), theta)
            expected += probabilities[n, label] * torch.outer(score, score) / 6
    torch.testing.assert_close(fisher(mlp, THETA, INPUTS, "categorical"), expected)


@pytest.mark.parametrize(("loss", "target"), [(F.cross_entropy, LABELS), (F.mse_loss, REAL)])
def test_hessian_of_a_bregman_discrepancy_is_the_ggn(loss, target):
    found = fsd_hessian(mlp, THETA, INPUTS, Bregman(loss), target)
    torch.testing.assert_close(found, ggn(mlp, loss, THETA, INPUTS, target))


def test_fisher_refuses_an_unknown_distribution():
    with pytest.raises(ValueError, match="'poisson'"):
        fisher(mlp, THETA, INPUTS, "poisson")  # type: ignore[arg-type]


def test_flatten_and_unflatten_are_inverse():
    tensors = {"a": normal(2, 3), "b": normal(()), "c": normal(4)}
    vector = flatten(tensors)
    assert vector.shape == (11,)
    for name, tensor in unflatten(vector, tensors).items():
        assert torch.equal(tensor, tensors[name])
    with pytest.raises(ValueError, match="vector must have the 11 elements"):
        unflatten(vector[:-1], tensors)
