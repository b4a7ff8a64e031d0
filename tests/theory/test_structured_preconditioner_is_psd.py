"""Section 4.4: (A kron B) diag(vec S)^2 (A kron B)^T is positive semidefinite, whatever A, B and S are."""

import pytest
import torch
from tests.theory.problem import normal


def structured(A, B, S):
    kron = torch.kron(A, B)
    return kron @ torch.diag(S.T.reshape(-1)) ** 2 @ kron.T


@pytest.mark.parametrize("seed", range(5))
def test_any_factors_give_a_positive_semidefinite_matrix(seed):
    A, B, S = normal(4, 4, seed=seed), normal(3, 3, seed=seed + 10), normal(3, 4, seed=seed + 20)
    P = structured(A, B, S)
    torch.testing.assert_close(P, P.T)
    eigenvalues = torch.linalg.eigvalsh(P)
    assert eigenvalues.min() > -1e-12 * eigenvalues.max()
    assert eigenvalues.max() > 0


@pytest.mark.parametrize("seed", range(5))
def test_the_preconditioned_gradient_is_a_descent_direction(seed):
    P = structured(normal(4, 4, seed=seed), normal(3, 3, seed=seed + 10), normal(3, 4, seed=seed + 20))
    g = normal(12, seed=seed + 30)
    assert g @ P @ g > 0


def test_without_the_square_it_would_not_be():
    A, B, S = normal(4, 4, seed=0), normal(3, 3, seed=10), normal(3, 4, seed=20)
    kron = torch.kron(A, B)
    indefinite = kron @ torch.diag(S.T.reshape(-1)) @ kron.T
    assert torch.linalg.eigvalsh(indefinite).min() < 0


def test_it_is_singular_only_where_a_factor_is():
    A, B, S = normal(4, 4, seed=0), normal(3, 3, seed=10), normal(3, 4, seed=20)
    assert torch.linalg.matrix_rank(structured(A, B, S)) == 12
    S = S.clone()
    S[1, 2] = 0
    assert torch.linalg.matrix_rank(structured(A, B, S)) == 11
