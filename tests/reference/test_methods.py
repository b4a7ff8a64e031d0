"""What the closed-form steps share beyond the theory tests: limits, and conjugate gradients against a solve."""

import pytest
import torch
from torch.nn import functional as F

from apo.reference import hessian, methods

THETA = torch.tensor([0.5, -1.0, 0.3, 0.8, -0.2, 0.1], dtype=torch.float64)
INPUTS = torch.randn(9, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])


def cost(theta):
    return F.cross_entropy(INPUTS @ theta.reshape(2, 3), LABELS)


def gradient():
    return torch.autograd.functional.jacobian(cost, THETA)


def test_hessian_free_takes_the_damped_newton_step_without_a_matrix():
    expected = methods.damped_newton(THETA, gradient(), hessian(cost, THETA), wsd_weight=0.1)
    torch.testing.assert_close(methods.hessian_free(cost, THETA, wsd_weight=0.1), expected)


def test_hessian_free_with_few_iterations_still_descends():
    moved = methods.hessian_free(cost, THETA, wsd_weight=0.1, max_iterations=1)
    assert cost(moved) < cost(THETA)
    assert not torch.allclose(moved, methods.hessian_free(cost, THETA, wsd_weight=0.1))


def test_hessian_free_refuses_negative_curvature():
    with pytest.raises(ValueError, match=r"wsd_weight must .*, got 0\.1 and a direction of curvature"):
        methods.hessian_free(lambda u: -u.square().sum(), THETA, wsd_weight=0.1)


def test_hessian_free_on_a_linear_cost_is_gradient_descent():
    slope = torch.arange(6.0, dtype=torch.float64)
    found = methods.hessian_free(lambda u: u @ slope, THETA, wsd_weight=2.0)
    torch.testing.assert_close(found, methods.gradient_descent(THETA, slope, wsd_weight=2.0))


def test_damped_newton_tends_to_newton_and_to_gradient_descent():
    curvature = hessian(cost, THETA) + torch.eye(6, dtype=torch.float64)
    newton = methods.newton(THETA, gradient(), curvature)
    torch.testing.assert_close(methods.damped_newton(THETA, gradient(), curvature, wsd_weight=0.0), newton)
    strong = methods.damped_newton(THETA, gradient(), curvature, wsd_weight=1e6)
    descent = methods.gradient_descent(THETA, gradient(), wsd_weight=1e6)
    torch.testing.assert_close((strong - THETA) * 1e6, (descent - THETA) * 1e6, rtol=1e-5, atol=1e-6)
