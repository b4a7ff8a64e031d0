"""Equation 4: a linear loss and a quadratic FSD give theta - (lambda_FSD G + lambda_WSD I)^-1 grad.

It also claims to approximate the exact proximal point: the error must vanish faster than the step as the
discrepancies are weighted more.
"""

import torch
from tests.theory.problem import (
    FSD_INPUTS,
    THETA,
    assert_minimises,
    cost,
    gradient,
    kl_curvature,
    network,
)

from apo.discrepancy import CategoricalKL
from apo.reference import exact_proximal_point, methods

G, SLOPE = kl_curvature(), gradient(cost)


def approximation(fsd_weight, wsd_weight):
    def objective(u):
        step = u - THETA
        return SLOPE @ step + fsd_weight / 2 * step @ G @ step + wsd_weight / 2 * step @ step

    return objective


def test_the_closed_form_minimises_the_approximate_objective():
    found = methods.quadratic_proximal(THETA, SLOPE, G, fsd_weight=0.4, wsd_weight=0.1)
    assert_minimises(approximation(0.4, 0.1), found)


def test_the_fsd_term_is_flat_at_the_old_weights():
    old = network(THETA, FSD_INPUTS)
    slope = gradient(lambda u: CategoricalKL()(network(u, FSD_INPUTS), old))
    assert slope.norm() < 1e-14


def relative_error(weight):
    old = network(THETA, FSD_INPUTS)
    exact = exact_proximal_point(
        cost,
        THETA,
        function_discrepancy=lambda u: CategoricalKL()(network(u, FSD_INPUTS), old),
        fsd_weight=weight,
        wsd_weight=weight / 10,
        tolerance=1e-9,
    )
    closed = methods.quadratic_proximal(THETA, SLOPE, G, fsd_weight=weight, wsd_weight=weight / 10)
    return ((closed - exact).norm() / (exact - THETA).norm()).item()


def test_it_approaches_the_exact_proximal_point_as_the_weights_grow():
    errors = [relative_error(weight) for weight in (10.0, 100.0, 1000.0)]
    # First-order convergence: ten times the weight, a tenth of the error.
    assert errors[1] < errors[0] / 5
    assert errors[2] < errors[1] / 5
    assert errors[2] < 0.02


def test_infinitely_strong_discrepancies_forbid_any_move():
    found = methods.quadratic_proximal(THETA, SLOPE, G, fsd_weight=1.0, wsd_weight=1e12)
    torch.testing.assert_close(found, THETA, rtol=0, atol=1e-11)
