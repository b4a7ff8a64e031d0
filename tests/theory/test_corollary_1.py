"""Corollary 1: where KFAC's assumptions hold, the best preconditioner is KFAC's, and A, B, S can represent it.

The assumptions hold exactly for a linear layer with Gaussian outputs of fixed covariance: the pre-activation
gradients are the noise, which is independent of the inputs. Weights are W [out, in]; vec stacks columns, as in the
paper, so that the gradient D a^T has vec = a kron D and the Fisher is E[a a^T] kron E[D D^T].
"""

import torch
from tests.theory.problem import assert_minimises, normal

from apo.discrepancy import SquaredError
from apo.reference import approximate_meta_objective, fsd_hessian, optimal_preconditioner

OUT, IN = 2, 3
INPUTS = normal(50, IN, seed=1)
MIX = normal(OUT, OUT, seed=2)
A = INPUTS.T @ INPUTS / 50
# Outputs are y = W a + noise with covariance (MIX^T MIX)^-1, so the score in s = W a has second moment MIX^T MIX.
B = MIX.T @ MIX


def whitened(theta, inputs):
    """Half the squared distance of whitened means is the KL divergence of the Gaussians; theta = vec(W) by columns."""
    weights = theta.reshape(IN, OUT).T
    return inputs @ weights.T @ MIX.T


def exact_fisher():
    return fsd_hessian(whitened, normal(OUT * IN, seed=3), INPUTS, SquaredError())


def sampled_score_gradients(samples=4000):
    """Gradients vec(D a^T) with D drawn independently of a: what KFAC assumes of every layer."""
    a = INPUTS[torch.arange(samples) % 50]
    scores = normal(samples, OUT, seed=4) @ MIX
    return torch.einsum("ni,nj->nij", a, scores).reshape(samples, IN * OUT)


def test_the_fisher_is_a_kronecker_product():
    torch.testing.assert_close(exact_fisher(), torch.kron(A, B))


def test_independent_activations_and_scores_have_that_second_moment():
    gradients = sampled_score_gradients()
    found = gradients.T @ gradients / len(gradients)
    assert (found - torch.kron(A, B)).norm() < 0.1 * torch.kron(A, B).norm()


def test_the_optimal_preconditioner_is_that_of_kfac():
    P = optimal_preconditioner(exact_fisher(), fsd_weight=1.0, wsd_weight=0.0)
    torch.testing.assert_close(P, torch.kron(torch.linalg.inv(A), torch.linalg.inv(B)))
    gradients = sampled_score_gradients(200)

    def Q(preconditioner):
        return approximate_meta_objective(preconditioner, gradients, exact_fisher(), fsd_weight=1.0, wsd_weight=0.0)

    assert_minimises(Q, P)


def test_the_structured_preconditioner_represents_it():
    values_A, basis_A = torch.linalg.eigh(A)
    values_B, basis_B = torch.linalg.eigh(B)
    # S [out, in] holds the inverse square roots of the products of eigenvalues; vec by columns.
    S = torch.outer(values_B, values_A) ** -0.5
    basis = torch.kron(basis_A, basis_B)
    structured = basis @ torch.diag(S.T.reshape(-1)) ** 2 @ basis.T
    torch.testing.assert_close(structured, optimal_preconditioner(exact_fisher(), fsd_weight=1.0, wsd_weight=0.0))


def test_damping_leaves_the_kronecker_form_but_not_the_structured_one():
    """(A kron B + lambda I)^-1 has no Kronecker form any more, yet the same basis with another S represents it."""
    P = optimal_preconditioner(exact_fisher(), fsd_weight=1.0, wsd_weight=0.5)
    # A Kronecker product, its blocks flattened into rows, has rank one.
    blocks = P.reshape(IN, OUT, IN, OUT).permute(0, 2, 1, 3).reshape(IN * IN, OUT * OUT)
    singular = torch.linalg.svdvals(blocks)
    assert singular[1] > 1e-3 * singular[0]
    values_A, basis_A = torch.linalg.eigh(A)
    values_B, basis_B = torch.linalg.eigh(B)
    S = (torch.outer(values_B, values_A) + 0.5) ** -0.5
    basis = torch.kron(basis_A, basis_B)
    torch.testing.assert_close(basis @ torch.diag(S.T.reshape(-1)) ** 2 @ basis.T, P)
