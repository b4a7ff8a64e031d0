"""The small network, data and curvature matrices that the theory tests share."""

import torch
from torch.nn import functional as F

from apo.discrepancy import Bregman, CategoricalKL
from apo.reference import fisher, fsd_hessian, ggn, hessian


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


INPUTS, LABELS = normal(30, 3, seed=1), torch.arange(30) % 3
FSD_INPUTS, FSD_LABELS = normal(40, 3, seed=2), torch.arange(40) % 3
THETA = normal(8, seed=3) / 2
IDENTITY = torch.eye(8, dtype=torch.float64)


def network(theta, x):
    """3 -> 2 tanh -> 2 free logits beside a fixed one: 8 weights that the Fisher all sees."""
    hidden = torch.tanh(x[:, :2] @ theta[:4].reshape(2, 2) + x[:, 2:])
    free = hidden @ theta[4:].reshape(2, 2)
    return torch.cat([free, torch.zeros_like(free[:, :1])], dim=1)


def cost(theta, inputs=INPUTS, labels=LABELS):
    return F.cross_entropy(network(theta, inputs), labels)


def gradient(function, at=THETA):
    point = at.detach().requires_grad_()
    return torch.autograd.grad(function(point), point)[0]


def mini_batch_gradients(size=3):
    """Gradients of ten mini-batches of three examples, [10, 8]; with 8 weights their second moment is regular."""
    return torch.stack(
        [gradient(lambda u, i=i: cost(u, INPUTS[i : i + size], LABELS[i : i + size])) for i in range(0, 30, size)]
    )


def loss_hessian():
    return hessian(cost, THETA)


def kl_curvature():
    return fsd_hessian(network, THETA, FSD_INPUTS, CategoricalKL())


def bregman_curvature():
    return fsd_hessian(network, THETA, FSD_INPUTS, Bregman(F.cross_entropy), FSD_LABELS)


def fisher_matrix():
    return fisher(network, THETA, FSD_INPUTS, "categorical")


def ggn_matrix():
    return ggn(network, F.cross_entropy, THETA, FSD_INPUTS, FSD_LABELS)


def assert_minimises(objective, point, *, tolerance=1e-9, radius=1e-2):
    """The gradient vanishes at the point and every one of 20 random perturbations increases the objective."""
    assert gradient(objective, point).norm() < tolerance
    for seed in range(20):
        direction = normal(*point.shape, seed=100 + seed)
        assert objective(point + radius * direction / direction.norm()) > objective(point)
