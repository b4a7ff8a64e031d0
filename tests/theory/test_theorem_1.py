"""Theorem 1: with the loss linearised and the FSD quadratic, the best preconditioner is an inverse of curvature.

The minimiser of the approximate meta-objective is (lambda_FSD G + lambda_WSD I)^-1 if the second moment of the
mini-batch gradients is non-singular.
"""

import pytest
import torch
from tests.theory.problem import (
    IDENTITY,
    assert_minimises,
    bregman_curvature,
    fisher_matrix,
    ggn_matrix,
    gradient,
    kl_curvature,
    mini_batch_gradients,
    normal,
)

from apo.reference import approximate_meta_objective, optimal_preconditioner

WEIGHTS = [(1.0, 0.1), (0.3, 0.01), (1.0, 0.0), (0.0, 0.5)]


def objective(fsd_weight, wsd_weight, gradients=None, curvature=None):
    gradients = mini_batch_gradients() if gradients is None else gradients
    curvature = kl_curvature() if curvature is None else curvature
    return lambda P: approximate_meta_objective(P, gradients, curvature, fsd_weight=fsd_weight, wsd_weight=wsd_weight)


def test_the_assumption_holds_for_these_gradients():
    gradients = mini_batch_gradients()
    assert torch.linalg.cond(gradients.T @ gradients) < 1e6


def test_the_objective_is_the_one_of_the_proof():
    gradients, G, P = mini_batch_gradients(), kl_curvature(), normal(8, 8, seed=4)
    expected = torch.stack(
        [-(g @ P @ g) + 0.3 / 2 * (g @ P.T @ G @ P @ g) + 0.2 / 2 * (P @ g) @ (P @ g) for g in gradients]
    ).mean()
    torch.testing.assert_close(objective(0.3, 0.2)(P), expected)


@pytest.mark.parametrize(("fsd_weight", "wsd_weight"), WEIGHTS)
def test_the_inverse_of_the_damped_curvature_is_the_minimum(fsd_weight, wsd_weight):
    P = optimal_preconditioner(kl_curvature(), fsd_weight=fsd_weight, wsd_weight=wsd_weight)
    torch.testing.assert_close(P @ (fsd_weight * kl_curvature() + wsd_weight * IDENTITY), IDENTITY)
    assert_minimises(objective(fsd_weight, wsd_weight), P)


def test_gradient_descent_on_the_preconditioner_reaches_it():
    # Gradients of unit second moment and moderate damping make the descent well-conditioned enough to watch.
    gradients = torch.linalg.qr(normal(16, 8, seed=5))[0] * 4
    Q = objective(1.0, 0.1, gradients)
    P = torch.zeros(8, 8, dtype=torch.float64)
    for _ in range(2000):
        P = P - 2.0 * gradient(Q, P)
    expected = optimal_preconditioner(kl_curvature(), fsd_weight=1.0, wsd_weight=0.1)
    torch.testing.assert_close(P, expected, rtol=1e-6, atol=1e-6)


def test_a_singular_second_moment_leaves_the_minimum_undetermined():
    gradients = mini_batch_gradients()[:5]
    Q = objective(1.0, 0.1, gradients)
    best = optimal_preconditioner(kl_curvature(), fsd_weight=1.0, wsd_weight=0.1)
    unseen = torch.linalg.svd(gradients).Vh[-1]
    other = best + torch.outer(normal(8, seed=6), unseen)
    assert not torch.allclose(other, best)
    torch.testing.assert_close(Q(other), Q(best))
    assert gradient(Q, other).norm() < 1e-10


def test_with_a_kl_divergence_it_is_the_damped_natural_gradient():
    P = optimal_preconditioner(kl_curvature(), fsd_weight=1.0, wsd_weight=0.1)
    torch.testing.assert_close(P, torch.linalg.inv(fisher_matrix() + 0.1 * IDENTITY))


def test_with_a_bregman_divergence_it_is_the_damped_gauss_newton():
    P = optimal_preconditioner(bregman_curvature(), fsd_weight=1.0, wsd_weight=0.1)
    torch.testing.assert_close(P, torch.linalg.inv(ggn_matrix() + 0.1 * IDENTITY))


def test_without_fsd_it_is_a_learning_rate():
    P = optimal_preconditioner(kl_curvature(), fsd_weight=0.0, wsd_weight=4.0)
    torch.testing.assert_close(P, IDENTITY / 4)
