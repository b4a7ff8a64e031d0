"""The exact proximal point: closed forms on quadratics, stationarity on networks, limits in the weights."""

import pytest
import torch

from apo.reference import exact_proximal_point


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(size, seed):
    factor = normal(size, size, seed=seed)
    return factor @ factor.T + torch.eye(size, dtype=torch.float64)


THETA, MINIMUM, H, G = normal(5, seed=1), normal(5, seed=2), positive(5, 3), positive(5, 4)


def cost(u):
    return (u - MINIMUM) @ H @ (u - MINIMUM) / 2


def discrepancy(u):
    return (u - THETA) @ G @ (u - THETA) / 2


def test_proximal_point_of_quadratics_solves_the_linear_system():
    found = exact_proximal_point(cost, THETA, function_discrepancy=discrepancy, fsd_weight=0.5, wsd_weight=0.2)
    pull = 0.5 * G + 0.2 * torch.eye(5, dtype=torch.float64)
    expected = torch.linalg.solve(H + pull, H @ MINIMUM + pull @ THETA)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def test_without_discrepancies_it_is_the_minimum_of_the_cost():
    torch.testing.assert_close(exact_proximal_point(cost, THETA), MINIMUM, rtol=0, atol=1e-8)


@pytest.mark.parametrize("weights", [{"wsd_weight": 1e9}, {"fsd_weight": 1e9}])
def test_infinite_weights_leave_the_old_weights(weights):
    found = exact_proximal_point(cost, THETA, function_discrepancy=discrepancy, tolerance=1e-4, **weights)
    torch.testing.assert_close(found, THETA, rtol=0, atol=1e-7)


def test_proximal_point_of_a_non_convex_cost_is_a_local_minimum():
    def rosenbrock(u):
        return (1 - u[0]) ** 2 + 100 * (u[1] - u[0] ** 2) ** 2

    theta = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    found = exact_proximal_point(rosenbrock, theta, wsd_weight=1e-4)

    def objective(u):
        return rosenbrock(u) + 0.5e-4 * (u - theta).square().sum()

    around = torch.autograd.functional.hessian(objective, found)
    assert torch.linalg.eigvalsh(around).min() > 0
    assert torch.autograd.functional.jacobian(objective, found).norm() < 1e-8


def test_an_objective_without_minimum_is_reported():
    with pytest.raises(RuntimeError, match=r"gradient norm .* raise wsd_weight"):
        exact_proximal_point(lambda u: u.sum(), THETA, max_rounds=1)
