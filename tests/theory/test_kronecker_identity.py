"""Section 4.4: P_S vec(G) = vec(B (S^2 * (B^T G A)) A^T), with vec stacking columns.

Four small products replace one with a matrix of (m n)^2 entries.
"""

import pytest
import torch
from tests.theory.problem import normal


def vec(matrix):
    """Stack the columns; torch's own order would stack the rows."""
    return matrix.T.reshape(-1)


@pytest.mark.parametrize(("rows", "columns"), [(3, 4), (4, 3), (1, 5), (5, 1), (4, 4)])
def test_structured_product_needs_no_large_matrix(rows, columns):
    A, B = normal(columns, columns, seed=1), normal(rows, rows, seed=2)
    S, G = normal(rows, columns, seed=3), normal(rows, columns, seed=4)
    kron = torch.kron(A, B)
    P = kron @ torch.diag(vec(S)) ** 2 @ kron.T
    torch.testing.assert_close(P @ vec(G), vec(B @ (S**2 * (B.T @ G @ A)) @ A.T))


def test_the_underlying_identity_of_the_kronecker_product():
    A, B, X = normal(4, 4, seed=1), normal(3, 3, seed=2), normal(3, 4, seed=3)
    torch.testing.assert_close(torch.kron(A, B) @ vec(X), vec(B @ X @ A.T))


def test_in_row_major_order_the_factors_change_places():
    A, B, X = normal(4, 4, seed=1), normal(3, 3, seed=2), normal(3, 4, seed=3)
    torch.testing.assert_close(torch.kron(B, A) @ X.reshape(-1), (B @ X @ A.T).reshape(-1))
    assert not torch.allclose(torch.kron(A, B) @ X.reshape(-1), (B @ X @ A.T).reshape(-1))
