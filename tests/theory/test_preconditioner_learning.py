"""Theorem 1 and Corollary 1, through the engine: what the meta-steps of a training run make of P.

The loss is linear in the weights and the discrepancy quadratic, so the approximations of the theorem are exact and the
optimum is known. At the optimum the meta-gradient of *every* mini-batch is zero, so gradient descent on the factors
does not stop at a noise floor: it gets there to rounding.
"""

import functools

import pytest
import torch
from tests.theory.problem import normal
from torch import nn

import apo
from apo.reference import optimal_preconditioner

INPUTS = normal(40, 4, seed=1) @ torch.diag(torch.tensor([2.0, 1.0, 0.7, 0.5], dtype=torch.float64))
SECOND_MOMENT = INPUTS.T @ INPUTS / 40


def linear_loss(outputs, target):
    return (outputs * target).sum() / len(outputs)


def learn(model, optimizer, outputs, steps, fsd_weight, wsd_weight, meta_rate=0.05):
    """Trains on random mini-batches, each with a random linear loss; B' is always the whole of INPUTS."""
    rule = apo.Preconditioned(optimizer, meta_optimizer=functools.partial(torch.optim.SGD, lr=meta_rate))
    tuner = apo.APO(
        rule,
        model,
        criterion=linear_loss,
        discrepancy=apo.SquaredError(),
        fsd_weight=fsd_weight,
        wsd_weight=wsd_weight,
        fsd_batch=[(INPUTS, torch.zeros(40, outputs, dtype=torch.float64))],
        interval=1,
    )
    for step in range(steps):
        tuner.step(normal(6, 4, seed=2 * step), 2 * normal(6, outputs, seed=2 * step + 1))
    (learned,) = optimizer.to_dense().values()
    return learned


def relative_error(found, expected):
    return float(torch.linalg.matrix_norm(found - expected) / torch.linalg.matrix_norm(expected))


@pytest.mark.parametrize("weights", [(1.0, 0.1), (0.5, 0.5), (2.0, 0.0), (0.0, 1.0)], ids=repr)
def test_a_full_preconditioner_becomes_the_inverse_of_the_damped_curvature(weights):
    fsd_weight, wsd_weight = weights
    model = nn.Linear(4, 1, bias=False).double()
    found = learn(model, apo.Full(model, lr=0.5), 1, 600, fsd_weight, wsd_weight)
    expected = optimal_preconditioner(SECOND_MOMENT, fsd_weight=fsd_weight, wsd_weight=wsd_weight)
    assert relative_error(0.5 * torch.eye(4, dtype=torch.float64), expected) > 0.1
    assert relative_error(found, expected) < 1e-6


def test_the_inverse_of_the_damped_curvature_is_a_fixed_point():
    model = nn.Linear(4, 1, bias=False).double()
    optimizer = apo.Full(model, lr=1.0)
    expected = optimal_preconditioner(SECOND_MOMENT, fsd_weight=1.0, wsd_weight=0.1)
    optimizer.factors()[0].copy_(torch.linalg.cholesky(expected))
    found = learn(model, optimizer, 1, 20, 1.0, 0.1)
    assert relative_error(found, expected) < 1e-12


def test_a_diagonal_preconditioner_becomes_the_best_diagonal_one():
    """With E[g g^T] a multiple of the identity, the diagonal of P minimises Q alone: 1 / (lambda G_ii + lambda)."""
    model = nn.Linear(4, 1, bias=False).double()
    optimizer = apo.Diagonal(model, lr=0.5)
    found = learn(model, optimizer, 1, 1500, 1.0, 0.1, meta_rate=0.01)
    expected = (SECOND_MOMENT.diagonal() + 0.1).reciprocal().diag()
    # Mini-batches disagree about the diagonal unless G is diagonal too, so this one has a noise floor.
    assert relative_error(found, expected) < 0.15
    assert relative_error(0.5 * torch.eye(4, dtype=torch.float64), expected) > 0.5


class Mixed(nn.Module):
    """A linear layer whose outputs are mixed by a fixed matrix, so that KFAC's second factor is not the identity."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2, bias=False).double()
        self.register_buffer("mix", torch.tensor([[1.5, 0.3], [-0.4, 0.8]], dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) @ self.mix.T


def test_a_kronecker_preconditioner_becomes_the_inverse_of_kfac():
    model = Mixed()
    optimizer = apo.Kronecker(model, lr=0.5)
    found = learn(model, optimizer, 2, 1000, 1.0, 0.0, meta_rate=0.01)
    second_factor = model.mix.T @ model.mix
    # Weights [out, in] flattened row by row: the curvature is (mix^T mix) kron E[a a^T].
    expected = torch.linalg.inv(torch.kron(second_factor, SECOND_MOMENT))
    assert relative_error(0.5 * torch.eye(8, dtype=torch.float64), expected) > 0.5
    assert relative_error(found, expected) < 1e-4


def distance_to_kronecker_products(matrix):
    """Returns the relative error of the best `[2, 2] kron [4, 4]` product: the tail of the rearrangement's spectrum."""
    rearranged = matrix.reshape(2, 4, 2, 4).permute(0, 2, 1, 3).reshape(4, 16)
    values = torch.linalg.svdvals(rearranged)
    return float(torch.linalg.vector_norm(values[1:]) / torch.linalg.vector_norm(values))


@pytest.mark.slow
def test_with_damping_it_comes_closer_than_any_kronecker_product_could():
    """The elementwise scale S represents the inverse of A kron B + lambda I in its eigenbasis, as EKFAC's does."""
    model = Mixed()
    found = learn(model, apo.Kronecker(model, lr=0.5), 2, 1500, 1.0, 1.0, meta_rate=0.02)
    curvature = torch.kron(model.mix.T @ model.mix, SECOND_MOMENT)
    expected = optimal_preconditioner(curvature, fsd_weight=1.0, wsd_weight=1.0)
    assert relative_error(found, expected) < 0.6 * distance_to_kronecker_products(expected)
