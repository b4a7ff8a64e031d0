"""At equal outputs every divergence is zero, flat, and curved like the Fisher information of its family."""

import pytest
import torch
from torch.autograd.functional import hessian

from apo.discrepancy import BernoulliKL, Bregman, CategoricalKL, GaussianKL, HuberDistance, PoissonKL, SquaredError

Z = torch.tensor([[0.3, -1.2, 0.8], [2.0, 0.1, -0.4]], dtype=torch.float64)
LABELS = torch.tensor([2, 0])

DISCREPANCIES = {
    "categorical": CategoricalKL(),
    "bernoulli": BernoulliKL(),
    "gaussian": GaussianKL(variance=0.3),
    "squared": SquaredError(),
    "poisson": PoissonKL(),
    "huber": HuberDistance(),
    "bregman": Bregman(torch.nn.functional.cross_entropy),
}


@pytest.mark.parametrize("name", DISCREPANCIES)
def test_value_and_gradient_vanish_at_equal_outputs(name):
    z = Z.clone().requires_grad_()
    value = DISCREPANCIES[name](z, Z, target=LABELS)
    assert value.item() == pytest.approx(0, abs=1e-15)
    (gradient,) = torch.autograd.grad(value, z)
    torch.testing.assert_close(gradient, torch.zeros_like(Z), atol=1e-15, rtol=0)


@pytest.mark.parametrize("name", DISCREPANCIES)
def test_value_is_positive_at_other_outputs(name):
    assert DISCREPANCIES[name](Z + 0.1 * Z.flip(0), Z, target=LABELS) > 1e-4


@pytest.mark.parametrize("name", DISCREPANCIES)
def test_gradient_agrees_with_finite_differences(name):
    new = (Z + 0.3 * Z.flip(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: DISCREPANCIES[name](z, Z, target=LABELS), new)


@pytest.mark.parametrize("name", DISCREPANCIES)
def test_no_gradient_reaches_the_old_outputs(name):
    old = Z.clone().requires_grad_()
    value = DISCREPANCIES[name](Z.flip(0).requires_grad_(), old, target=LABELS)
    value.backward()
    assert old.grad is None


def curvature(discrepancy):
    """Hessian blocks of the examples, times their number because the discrepancy is a mean."""
    full = hessian(lambda z: discrepancy(z, Z, target=LABELS), Z)
    assert isinstance(full, torch.Tensor)
    assert (full[0, :, 1] == 0).all()
    return torch.stack([full[0, :, 0], full[1, :, 1]]) * 2


@pytest.mark.parametrize("name", ["categorical", "bregman"])
def test_curvature_of_categorical_outputs_is_diag_p_minus_p_p(name):
    p = Z.softmax(dim=1)
    expected = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    torch.testing.assert_close(curvature(DISCREPANCIES[name]), expected)


def test_curvature_of_bernoulli_outputs_is_p_times_one_minus_p():
    p = Z.sigmoid()
    torch.testing.assert_close(curvature(DISCREPANCIES["bernoulli"]), torch.diag_embed(p * (1 - p)))


@pytest.mark.parametrize(("name", "precision"), [("gaussian", 1 / 0.3), ("squared", 1.0)])
def test_curvature_of_means_is_the_precision(name, precision):
    expected = precision * torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
    torch.testing.assert_close(curvature(DISCREPANCIES[name]), expected)


def test_curvature_of_mean_and_log_variance_is_the_fisher_information():
    mean, log_variance = Z[0, :1], Z[1, :1]

    def divergence(both):
        return GaussianKL()((both[:1], both[1:]), (mean, log_variance))

    found = hessian(divergence, torch.cat([mean, log_variance]))
    expected = torch.diag(torch.stack([torch.exp(-log_variance[0]), torch.tensor(0.5, dtype=torch.float64)]))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "squared", "probabilities"])
def test_residuals_at_sampled_targets_have_the_curvature_as_covariance(name):
    discrepancy = BernoulliKL(of="probabilities") if name == "probabilities" else DISCREPANCIES[name]
    z = Z[:1].sigmoid() if name == "probabilities" else Z[:1]
    residuals = discrepancy.residual(z.expand(40_000, 3), torch.Generator().manual_seed(1))
    metric = hessian(lambda new: discrepancy(new, z), z).reshape(3, 3)
    torch.testing.assert_close(residuals.mean(0), torch.zeros_like(Z[0]), rtol=0, atol=0.06)
    torch.testing.assert_close(residuals.mT @ residuals / len(residuals), metric, rtol=0.05, atol=0.1)


def test_classes_are_drawn_along_their_dimension():
    logits = torch.randn(4, 3, 5)
    residual = CategoricalKL(dim=1).residual(logits, torch.Generator().manual_seed(1))
    drawn = logits.softmax(1) - residual
    assert ((drawn.abs() < 1e-6) | ((drawn - 1).abs() < 1e-6)).all() and (drawn.sum(1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["gaussian", "poisson", "huber", "bregman"])
def test_a_discrepancy_without_a_sampler_says_so(name):
    with pytest.raises(TypeError, match="targets cannot be drawn for"):
        DISCREPANCIES[name].sampled_loss(Z, torch.Generator())
