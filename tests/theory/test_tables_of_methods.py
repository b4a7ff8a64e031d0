"""The two tables of methods: each classical step minimises its row's approximation of the proximal objective.

A row says how the loss is approximated, which FSD is used to which order, and whether the WSD is present. The test
builds that approximation from the row and checks that the closed-form step is its minimum.
"""

import pytest
import torch
from tests.theory.problem import (
    FSD_INPUTS,
    FSD_LABELS,
    INPUTS,
    THETA,
    assert_minimises,
    bregman_curvature,
    cost,
    fisher_matrix,
    ggn_matrix,
    gradient,
    kl_curvature,
    loss_hessian,
    network,
    normal,
)
from torch.nn import functional as F

from apo.discrepancy import Bregman, CategoricalKL
from apo.reference import methods

SLOPE = gradient(cost)
FSD, WSD = 0.7, 0.5


def linear_loss(u):
    return cost(THETA) + SLOPE @ (u - THETA)


def quadratic_loss(u, hessian):
    return linear_loss(u) + (u - THETA) @ hessian @ (u - THETA) / 2


def quadratic_fsd(u, curvature):
    return (u - THETA) @ curvature @ (u - THETA) / 2


def wsd(u):
    return (u - THETA).square().sum() / 2


def exact_fsd(u, rho, target=None):
    return rho(network(u, FSD_INPUTS), network(THETA, FSD_INPUTS), target=target)


def test_gradient_descent_minimises_linear_loss_and_wsd():
    found = methods.gradient_descent(THETA, SLOPE, wsd_weight=WSD)
    assert_minimises(lambda u: linear_loss(u) + WSD * wsd(u), found)


def test_hessian_free_minimises_quadratic_loss_and_wsd():
    found = methods.hessian_free(cost, THETA, wsd_weight=WSD)
    hessian = loss_hessian()
    assert_minimises(lambda u: quadratic_loss(u, hessian) + WSD * wsd(u), found)


def convex_cost(u):
    """Newton's row needs a positive definite Hessian: a ridge makes the cost convex around theta."""
    return cost(u) + 0.5 * u.square().sum()


def test_newton_minimises_quadratic_loss():
    hessian = loss_hessian() + torch.eye(8, dtype=torch.float64)
    slope = gradient(convex_cost)
    found = methods.newton(THETA, slope, hessian)
    assert_minimises(lambda u: slope @ (u - THETA) + quadratic_fsd(u, hessian), found)


def test_damped_newton_minimises_quadratic_loss_and_wsd():
    hessian = loss_hessian()
    found = methods.damped_newton(THETA, SLOPE, hessian, wsd_weight=WSD)
    assert_minimises(lambda u: quadratic_loss(u, hessian) + WSD * wsd(u), found)


@pytest.mark.parametrize("fsd_weight", [1.0, FSD])
def test_natural_gradient_minimises_linear_loss_and_quadratic_kl(fsd_weight):
    found = methods.natural_gradient(THETA, SLOPE, fisher_matrix(), fsd_weight=fsd_weight)
    curvature = kl_curvature()
    assert_minimises(lambda u: linear_loss(u) + fsd_weight * quadratic_fsd(u, curvature), found)


def test_damped_natural_gradient_minimises_linear_loss_quadratic_kl_and_wsd():
    found = methods.damped_natural_gradient(THETA, SLOPE, fisher_matrix(), wsd_weight=WSD, fsd_weight=FSD)
    curvature = kl_curvature()
    assert_minimises(lambda u: linear_loss(u) + FSD * quadratic_fsd(u, curvature) + WSD * wsd(u), found)


@pytest.mark.parametrize("fsd_weight", [1.0, FSD])
def test_gauss_newton_minimises_linear_loss_and_quadratic_bregman(fsd_weight):
    found = methods.gauss_newton(THETA, SLOPE, ggn_matrix(), fsd_weight=fsd_weight)
    curvature = bregman_curvature()
    assert_minimises(lambda u: linear_loss(u) + fsd_weight * quadratic_fsd(u, curvature), found)


def test_damped_gauss_newton_minimises_linear_loss_quadratic_bregman_and_wsd():
    found = methods.damped_gauss_newton(THETA, SLOPE, ggn_matrix(), wsd_weight=WSD, fsd_weight=FSD)
    curvature = bregman_curvature()
    assert_minimises(lambda u: linear_loss(u) + FSD * quadratic_fsd(u, curvature) + WSD * wsd(u), found)


@pytest.mark.parametrize(
    ("rho", "target"), [(CategoricalKL(), None), (Bregman(F.cross_entropy), FSD_LABELS)], ids=["KL", "Bregman"]
)
def test_direct_proximal_optimization_minimises_the_objective_itself(rho, target):
    found = methods.direct_proximal(cost, THETA, lambda u: exact_fsd(u, rho, target), fsd_weight=FSD, wsd_weight=WSD)
    assert_minimises(lambda u: cost(u) + FSD * exact_fsd(u, rho, target) + WSD * wsd(u), found, tolerance=2e-8)


def test_natural_gradient_does_not_depend_on_the_parameterization():
    """The reason why its row leaves the WSD out: reparameterized weights take the same step in function space."""
    change = normal(8, 8, seed=9) / 4 + torch.eye(8, dtype=torch.float64)
    # theta = change @ psi, so gradients and Fisher transform with its transpose.
    step = methods.natural_gradient(THETA, SLOPE, fisher_matrix()) - THETA
    zero = torch.zeros_like(THETA)
    moved = methods.natural_gradient(zero, change.T @ SLOPE, change.T @ fisher_matrix() @ change)
    torch.testing.assert_close(change @ moved, step)
    damped = methods.damped_natural_gradient(
        zero, change.T @ SLOPE, change.T @ fisher_matrix() @ change, wsd_weight=WSD
    )
    expected = methods.damped_natural_gradient(THETA, SLOPE, fisher_matrix(), wsd_weight=WSD) - THETA
    assert not torch.allclose(change @ damped, expected, rtol=1e-2)


def test_the_rows_are_different_methods():
    steps = [
        methods.gradient_descent(THETA, SLOPE, wsd_weight=WSD),
        methods.damped_newton(THETA, SLOPE, loss_hessian(), wsd_weight=WSD),
        methods.damped_natural_gradient(THETA, SLOPE, fisher_matrix(), wsd_weight=WSD),
        methods.direct_proximal(cost, THETA, lambda u: exact_fsd(u, CategoricalKL()), fsd_weight=1.0, wsd_weight=WSD),
    ]
    assert INPUTS.shape[0] != FSD_INPUTS.shape[0]
    for i, first in enumerate(steps):
        for second in steps[:i]:
            assert (first - second).norm() > 1e-3 * (first - THETA).norm()
