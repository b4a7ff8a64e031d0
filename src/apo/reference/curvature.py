r"""Dense curvature matrices of small networks: Hessian, generalized Gauss-Newton, Fisher, Hessian of the FSD.

All take the weights as one flat vector :math:`\theta \in \mathbb R^m`, which :func:`flatten` makes of named ones, and
return ``[m, m]`` matrices. ``model_fn`` maps ``(theta, inputs)`` to outputs ``[n, ...]``; losses are means over the
``n`` examples, as in Eq. 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import jacrev

from apo.discrepancy import Discrepancy

ModelFunction = Callable[[Tensor, Any], Tensor]
"""``(theta, inputs) -> outputs`` with flat weights."""


def hessian(function: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    r"""Return the Hessian of a scalar function at :math:`\theta`.

    Args:
        function: Maps a vector ``[m]`` to a scalar.
        theta: Where to evaluate.

    Example:
        >>> hessian(lambda u: u[0] ** 2 + 3 * u[0] * u[1], torch.zeros(2))
        tensor([[2., 3.],
                [3., 0.]])
    """
    # Reverse over reverse mode, because `function` may itself call autograd.grad, as Bregman does.
    matrix = torch.autograd.functional.hessian(function, theta)
    assert isinstance(matrix, Tensor)
    return matrix


def ggn(model_fn: ModelFunction, loss: Callable[..., Tensor], theta: Tensor, inputs: Any, target: Any) -> Tensor:
    r"""Return the generalized Gauss-Newton matrix :math:`Z^\top H_z Z` of :math:`\ell(f(x, \theta), y)`.

    :math:`Z` is the Jacobian of all outputs, :math:`H_z` the Hessian of the loss in them (Appendix F.3).

    Args:
        model_fn: The network.
        loss: ``loss(outputs, target)``, a scalar.
        theta: Flat weights ``[m]``.
        inputs: The batch.
        target: Its targets.

    Example:
        >>> ggn(lambda theta, x: x @ theta, torch.nn.functional.mse_loss, torch.ones(2), torch.eye(2), torch.zeros(2))
        tensor([[1., 0.],
                [0., 1.]])
    """
    outputs = model_fn(theta, inputs)
    jacobian = _jacobian(model_fn, theta, inputs).flatten(end_dim=-2)
    curvature = hessian(lambda z: loss(z.reshape(outputs.shape), target), outputs.detach().reshape(-1))
    return jacobian.T @ curvature @ jacobian


def fisher(
    model_fn: ModelFunction,
    theta: Tensor,
    inputs: Any,
    distribution: Literal["categorical", "bernoulli", "gaussian"] = "categorical",
    variance: float = 1.0,
) -> Tensor:
    r"""Return the Fisher information matrix of the model's predictive distribution.

    .. math:: F = \mathbb E_{x,\, y \sim p(\cdot|x, \theta)}[\nabla \log p(y|x)\, \nabla \log p(y|x)^\top]

    The expectation over the predictive distribution is exact: the scores of all outcomes are weighted with their
    probabilities in output space, then mapped to the weights by the Jacobian.

    Args:
        model_fn: The network, with outputs ``[n, d]``.
        theta: Flat weights ``[m]``.
        inputs: The batch.
        distribution: Whether outputs are logits of one categorical variable, logits of ``d`` independent binary ones,
            or means of ``d`` independent Gaussians.
        variance: The known variance of the Gaussians.

    Raises:
        ValueError: If the distribution is unknown.

    Example:
        >>> fisher(lambda theta, x: x @ theta.reshape(2, 1), torch.ones(2), torch.eye(2), "gaussian")
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])
    """
    outputs = model_fn(theta, inputs).detach()
    jacobian = _jacobian(model_fn, theta, inputs)
    information = torch.stack([_output_fisher(z, distribution, variance) for z in outputs])
    return torch.einsum("nim,nij,njk->mk", jacobian, information, jacobian) / outputs.shape[0]


def fsd_hessian(
    model_fn: ModelFunction, theta: Tensor, inputs: Any, discrepancy: Discrepancy, target: Any = None
) -> Tensor:
    r"""Return :math:`G = \nabla^2_u \mathbb E_x[\rho(f(x, u), f(x, \theta))]` at :math:`u = \theta` (Eq. 4).

    Args:
        model_fn: The network.
        theta: Flat weights ``[m]``.
        inputs: The FSD batch.
        discrepancy: The divergence :math:`\rho`.
        target: Targets of the batch, for discrepancies that need them.

    Example:
        >>> from apo.discrepancy import SquaredError
        >>> fsd_hessian(lambda theta, x: x @ theta.reshape(2, 1), torch.ones(2), torch.eye(2), SquaredError())
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])
    """
    old = model_fn(theta, inputs).detach()
    return hessian(lambda u: discrepancy(model_fn(u, inputs), old, target=target), theta)


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Concatenate named tensors, in their order, into one vector.

    Example:
        >>> flatten({"a": torch.zeros(2), "b": torch.ones(1, 1)})
        tensor([0., 0., 1.])
    """
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split a vector into named tensors shaped like the given ones; the inverse of :func:`flatten`.

    Raises:
        ValueError: If the sizes do not add up.

    Example:
        >>> unflatten(torch.arange(3.0), {"a": torch.zeros(2), "b": torch.ones(1, 1)})
        {'a': tensor([0., 1.]), 'b': tensor([[2.]])}
    """
    sizes = [tensor.numel() for tensor in like.values()]
    if vector.ndim != 1 or vector.numel() != sum(sizes):
        raise ValueError(
            f"vector must have the {sum(sizes)} elements of the named tensors, got shape {tuple(vector.shape)}"
        )
    return {
        name: part.reshape(tensor.shape) for (name, tensor), part in zip(like.items(), vector.split(sizes), strict=True)
    }


def _jacobian(model_fn: ModelFunction, theta: Tensor, inputs: Any) -> Tensor:
    """Return the Jacobian of the outputs, shape ``[*outputs, m]``."""
    return jacrev(lambda u: model_fn(u, inputs))(theta).detach()


def _output_fisher(z: Tensor, distribution: str, variance: float) -> Tensor:
    """Return the Fisher information ``[d, d]`` with respect to the outputs ``[d]`` of one example."""
    identity = torch.eye(z.numel(), dtype=z.dtype, device=z.device)
    if distribution == "categorical":
        p = torch.softmax(z, dim=-1)
        return sum((p[c] * torch.outer(identity[c] - p, identity[c] - p) for c in range(len(p))), 0 * identity)
    if distribution == "bernoulli":
        # The scores are independent with mean zero, so only their squares have an expectation.
        p = torch.sigmoid(z)
        return torch.diag(p * (1 - p) ** 2 + (1 - p) * (0 - p) ** 2)
    if distribution == "gaussian":
        return identity / variance
    raise ValueError(f"distribution must be 'categorical', 'bernoulli' or 'gaussian', got {distribution!r}")
