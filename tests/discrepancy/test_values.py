"""Each divergence against torch.distributions, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Bernoulli, Categorical, Normal, Poisson, kl_divergence

from apo.discrepancy import BernoulliKL, CategoricalKL, GaussianKL, HuberDistance, PoissonKL, SquaredError


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_categorical_kl_is_the_kl_from_old_to_new():
    new, old = normal(5, 7, seed=1), normal(5, 7, seed=2)
    expected = kl_divergence(Categorical(logits=old), Categorical(logits=new)).mean()
    torch.testing.assert_close(CategoricalKL()(new, old), expected)


def test_categorical_kl_of_log_probabilities_equals_that_of_logits():
    new, old = normal(5, 7, seed=1), normal(5, 7, seed=2)
    torch.testing.assert_close(CategoricalKL()(new.log_softmax(-1), old), CategoricalKL()(new, old))


@pytest.mark.parametrize(("dim", "to_last"), [(1, [0, 2, 3, 1]), (0, [1, 2, 3, 0]), (-2, [0, 1, 3, 2])])
def test_categorical_kl_takes_the_classes_from_dim(dim, to_last):
    new, old = normal(2, 3, 4, 5, seed=1), normal(2, 3, 4, 5, seed=2)
    expected = CategoricalKL()(new.permute(to_last), old.permute(to_last))
    torch.testing.assert_close(CategoricalKL(dim=dim)(new, old), expected)


@pytest.mark.parametrize(("shape", "dim"), [((4,), 0), ((3, 4), 1), ((3, 4, 5), 1), ((3, 4, 5, 2), 1)])
def test_categorical_kl_follows_the_class_dimension_of_cross_entropy(shape, dim):
    new, old = normal(*shape, seed=1), normal(*shape, seed=2)
    torch.testing.assert_close(CategoricalKL("torch")(new, old), CategoricalKL(dim)(new, old))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_bernoulli_kl_is_the_kl_from_old_to_new(reduction):
    new, old = normal(5, 2, 3, seed=1), normal(5, 2, 3, seed=2)
    elements = kl_divergence(Bernoulli(logits=old), Bernoulli(logits=new))
    expected = elements.sum() / 5 if reduction == "sum" else elements.mean()
    torch.testing.assert_close(BernoulliKL(reduction)(new, old), expected)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_gaussian_kl_with_learned_variance_is_the_kl_from_old_to_new(reduction):
    new, old = (normal(5, 3, seed=1), normal(5, 3, seed=2)), (normal(5, 3, seed=3), normal(5, 3, seed=4))
    before, after = (Normal(mean, (log_variance / 2).exp()) for mean, log_variance in (old, new))
    elements = kl_divergence(before, after)
    expected = elements.sum() / 5 if reduction == "sum" else elements.mean()
    torch.testing.assert_close(GaussianKL(reduction=reduction)(new, old), expected)


def test_gaussian_kl_with_known_variance_is_the_kl_from_old_to_new():
    new, old = normal(5, 3, seed=1), normal(5, 3, seed=2)
    expected = kl_divergence(Normal(old, 0.7**0.5), Normal(new, 0.7**0.5)).sum(dim=1).mean()
    torch.testing.assert_close(GaussianKL(variance=0.7)(new, old), expected)


def test_gaussian_kl_broadcasts_one_log_variance_over_the_means():
    mean, old_mean, log_variance = normal(5, 3, seed=1), normal(5, 3, seed=2), normal(5, 1, seed=3)
    expected = GaussianKL()((mean, log_variance.expand(5, 3)), (old_mean, log_variance.expand(5, 3)))
    torch.testing.assert_close(GaussianKL()((mean, log_variance), (old_mean, log_variance)), expected)


def test_gaussian_kl_takes_variances_as_well_as_their_logarithms():
    new, old = (normal(5, 3, seed=1), normal(5, 3, seed=2)), (normal(5, 3, seed=3), normal(5, 3, seed=4))
    value = GaussianKL(of="variance")((new[0], new[1].exp()), (old[0], old[1].exp()))
    torch.testing.assert_close(value, GaussianKL()(new, old))


def test_bernoulli_kl_of_probabilities_equals_that_of_logits():
    new, old = normal(5, 3, seed=1).requires_grad_(), normal(5, 3, seed=2)
    value, expected = BernoulliKL(of="probabilities")(new.sigmoid(), old.sigmoid()), BernoulliKL()(new, old)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, new), torch.autograd.grad(expected, new))


def test_bernoulli_kl_of_saturated_probabilities_is_finite():
    new = torch.tensor([[0.0, 1.0, 0.5, 0.0]], requires_grad=True)
    value = BernoulliKL(of="probabilities")(new, torch.tensor([[1.0, 0.0, 1.0, 0.0]]))
    (gradient,) = torch.autograd.grad(value, new)
    assert value.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("log_input", [True, False])
def test_poisson_kl_is_the_kl_from_old_to_new(reduction, log_input):
    new, old = normal(5, 2, 3, seed=1), normal(5, 2, 3, seed=2)
    elements = kl_divergence(Poisson(old.exp()), Poisson(new.exp()))
    expected = elements.sum() / 5 if reduction == "sum" else elements.mean()
    outputs = (new, old) if log_input else (new.exp(), old.exp())
    torch.testing.assert_close(PoissonKL(log_input, reduction)(*outputs), expected, atol=1e-7, rtol=1e-7)


def test_huber_distance_is_the_robust_loss_between_new_and_old_outputs():
    new, old = 3 * normal(5, 3, seed=1), normal(5, 3, seed=2)
    huber, smooth = torch.nn.HuberLoss(delta=0.5)(new, old), torch.nn.SmoothL1Loss(beta=2.0)(new, old)
    torch.testing.assert_close(HuberDistance(0.5, 0.5, "mean")(new, old), huber)
    torch.testing.assert_close(HuberDistance(2.0, reduction="mean")(new, old), smooth)


def test_huber_distance_is_linear_beyond_the_mean_distance_from_the_targets_if_that_is_more():
    new, old, target = normal(5, 3, seed=1), normal(5, 3, seed=2), 100 * normal(5, 3, seed=3)
    delta = F.l1_loss(old, target).item()
    expected = F.smooth_l1_loss(new, old, beta=delta)
    torch.testing.assert_close(HuberDistance(reduction="mean")(new, old, target=target), expected)
    kept = torch.tensor([True, False, True, True, False])
    some = HuberDistance(reduction="mean")(new[kept], old[kept], target=target[kept])
    torch.testing.assert_close(HuberDistance(reduction="mean")(new, old, kept, target), some)
    for near in (old + 0.01, torch.zeros(5), None):  # nothing to reach for, other targets, none
        torch.testing.assert_close(HuberDistance()(new, old, target=near), HuberDistance()(new, old))


def test_squared_error_has_a_half_when_summed_and_none_when_averaged():
    new, old = normal(5, 3, seed=1), normal(5, 3, seed=2)
    torch.testing.assert_close(SquaredError()(new, old), ((new - old) ** 2).sum(dim=1).mean() / 2)
    torch.testing.assert_close(SquaredError("mean")(new, old), torch.nn.functional.mse_loss(new, old))


def test_categorical_kl_ignores_classes_excluded_at_both_weights():
    new, old = normal(4, 5, seed=1), normal(4, 5, seed=2)
    expected = CategoricalKL()(new, old)
    excluded = torch.full((4, 2), -torch.inf, dtype=torch.float64)
    new = torch.cat([new, excluded], dim=1).requires_grad_()
    value = CategoricalKL()(new, torch.cat([old, excluded], dim=1))
    torch.testing.assert_close(value, expected)
    (gradient,) = torch.autograd.grad(value, new)
    assert gradient.isfinite().all()
    assert (gradient[:, 5:] == 0).all()


def test_categorical_kl_is_infinite_where_the_new_weights_exclude_a_likely_class():
    old = torch.zeros(1, 2)
    assert CategoricalKL()(torch.tensor([[0.0, -torch.inf]]), old).isinf()


def test_bernoulli_kl_of_certain_outcomes_is_finite():
    old = torch.tensor([[torch.inf, -torch.inf, 2000.0]], dtype=torch.float64)
    new = torch.tensor([[torch.inf, -torch.inf, 3.0]], dtype=torch.float64).requires_grad_()
    value = BernoulliKL()(new, old)
    torch.testing.assert_close(value, torch.nn.functional.softplus(torch.tensor(-3.0, dtype=torch.float64)))
    (gradient,) = torch.autograd.grad(value, new)
    assert gradient.isfinite().all()
