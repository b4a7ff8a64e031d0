r"""Closed-form steps for every row of the paper's tables of methods (Table 1 and Appendix F).

Each classical method minimises an approximation of the proximal objective (Eq. 3): the loss is linear, quadratic or
exact, the function-space term absent, quadratic or exact, the weight-space term present or absent. ``theta`` and
``gradient`` are flat, ``[m]``; curvature matrices are dense, ``[m, m]``. Every function returns the new weights.

================================  ==========  =====================  ===
method                            loss        FSD                    WSD
================================  ==========  =====================  ===
:func:`gradient_descent`          1st order   -                      yes
:func:`hessian_free`              2nd order   -                      yes
:func:`newton`                    2nd order   -                      no
:func:`damped_newton`             2nd order   -                      yes
:func:`natural_gradient`          1st order   2nd order, KL          no
:func:`damped_natural_gradient`   1st order   2nd order, KL          yes
:func:`gauss_newton`              1st order   2nd order, Bregman     no
:func:`damped_gauss_newton`       1st order   2nd order, Bregman     yes
:func:`direct_proximal`           exact       exact, any             yes
================================  ==========  =====================  ===
"""

from __future__ import annotations

import torch
from torch import Tensor

from .proximal import ScalarFunction, exact_proximal_point


def quadratic_proximal(
    theta: Tensor, gradient: Tensor, curvature: Tensor, *, fsd_weight: float, wsd_weight: float
) -> Tensor:
    r"""Loss to first, FSD to second order, with WSD: the general form of the methods below (Eq. 4).

    .. math:: \theta' = \theta - (\lambda_{\mathrm{FSD}} G + \lambda_{\mathrm{WSD}} I)^{-1}
              \nabla \mathcal J_{\mathcal B}(\theta)

    Example:
        >>> quadratic_proximal(torch.zeros(2), torch.ones(2), torch.eye(2), fsd_weight=1.0, wsd_weight=1.0)
        tensor([-0.5000, -0.5000])
    """
    damped = fsd_weight * curvature + wsd_weight * torch.eye(theta.numel(), dtype=theta.dtype, device=theta.device)
    return theta - torch.linalg.solve(damped, gradient)


def gradient_descent(theta: Tensor, gradient: Tensor, *, wsd_weight: float) -> Tensor:
    r"""Loss to first order, no FSD, with WSD.

    .. math:: \theta' = \theta - \nabla \mathcal J / \lambda_{\mathrm{WSD}}

    Example:
        >>> gradient_descent(torch.zeros(2), torch.ones(2), wsd_weight=10.0)
        tensor([-0.1000, -0.1000])
    """
    return theta - gradient / wsd_weight


def newton(theta: Tensor, gradient: Tensor, hessian: Tensor) -> Tensor:
    r"""Loss to second order, no FSD, no WSD.

    .. math:: \theta' = \theta - H^{-1} \nabla \mathcal J

    Example:
        >>> newton(torch.zeros(2), torch.ones(2), 2 * torch.eye(2))
        tensor([-0.5000, -0.5000])
    """
    return theta - torch.linalg.solve(hessian, gradient)


def damped_newton(theta: Tensor, gradient: Tensor, hessian: Tensor, *, wsd_weight: float) -> Tensor:
    r"""Loss to second order, no FSD, with WSD.

    .. math:: \theta' = \theta - (H + \lambda_{\mathrm{WSD}} I)^{-1} \nabla \mathcal J

    Example:
        >>> damped_newton(torch.zeros(2), torch.ones(2), torch.eye(2), wsd_weight=1.0)
        tensor([-0.5000, -0.5000])
    """
    return quadratic_proximal(theta, gradient, hessian, fsd_weight=1.0, wsd_weight=wsd_weight)


def hessian_free(
    cost: ScalarFunction,
    theta: Tensor,
    *,
    wsd_weight: float,
    max_iterations: int | None = None,
    tolerance: float = 1e-12,
) -> Tensor:
    r"""Loss to second order, no FSD, with WSD, by conjugate gradients: no matrix is built.

    Solves :math:`(H + \lambda_{\mathrm{WSD}} I)\, (\theta - \theta') = \nabla \mathcal J` with Hessian-vector products,
    which gives the step of :func:`damped_newton`. The damped Hessian must be positive definite.

    Args:
        cost: :math:`\mathcal J_{\mathcal B}`, a function of the flat weights.
        theta: The old weights ``[m]``.
        wsd_weight: :math:`\lambda_{\mathrm{WSD}}`, the damping.
        max_iterations: Of the conjugate gradients; twice the number of weights by default.
        tolerance: On the residual's norm, relative to the gradient's.

    Raises:
        ValueError: If a direction has non-positive curvature.

    Example:
        >>> hessian_free(lambda u: u.square().sum() / 2, torch.ones(2), wsd_weight=1.0)
        tensor([0.5000, 0.5000])
    """

    def damped_product(vector: Tensor) -> Tensor:
        _, product = torch.autograd.functional.vhp(cost, theta, vector)
        assert isinstance(product, Tensor)
        return product + wsd_weight * vector

    gradient = torch.autograd.functional.jacobian(cost, theta)
    assert isinstance(gradient, Tensor)
    solution = torch.zeros_like(theta)
    residual = direction = gradient
    limit = tolerance * gradient.norm()
    for _ in range(max_iterations or 2 * theta.numel()):
        if residual.norm() <= limit:
            break
        product = damped_product(direction)
        curvature = direction @ product
        if curvature <= 0:
            raise ValueError(
                f"wsd_weight must make the damped Hessian positive definite, got {wsd_weight} and a direction of "
                f"curvature {float(curvature):.1e}: raise it"
            )
        length = residual @ residual / curvature
        solution = solution + length * direction
        next_residual = residual - length * product
        direction = next_residual + (next_residual @ next_residual) / (residual @ residual) * direction
        residual = next_residual
    return theta - solution


def natural_gradient(theta: Tensor, gradient: Tensor, fisher: Tensor, *, fsd_weight: float = 1.0) -> Tensor:
    r"""Loss to first, KL to second order, no WSD.

    .. math:: \theta' = \theta - (\lambda_{\mathrm{FSD}} F)^{-1} \nabla \mathcal J

    Example:
        >>> natural_gradient(torch.zeros(2), torch.ones(2), 2 * torch.eye(2))
        tensor([-0.5000, -0.5000])
    """
    return quadratic_proximal(theta, gradient, fisher, fsd_weight=fsd_weight, wsd_weight=0.0)


def damped_natural_gradient(
    theta: Tensor, gradient: Tensor, fisher: Tensor, *, wsd_weight: float, fsd_weight: float = 1.0
) -> Tensor:
    r"""Loss to first, KL to second order, with WSD.

    .. math:: \theta' = \theta - (\lambda_{\mathrm{FSD}} F + \lambda_{\mathrm{WSD}} I)^{-1} \nabla \mathcal J

    Example:
        >>> damped_natural_gradient(torch.zeros(2), torch.ones(2), torch.eye(2), wsd_weight=1.0)
        tensor([-0.5000, -0.5000])
    """
    return quadratic_proximal(theta, gradient, fisher, fsd_weight=fsd_weight, wsd_weight=wsd_weight)


def gauss_newton(theta: Tensor, gradient: Tensor, ggn: Tensor, *, fsd_weight: float = 1.0) -> Tensor:
    r"""Loss to first, its Bregman divergence to second order, no WSD.

    .. math:: \theta' = \theta - (\lambda_{\mathrm{FSD}} Z^\top H_z Z)^{-1} \nabla \mathcal J

    Example:
        >>> gauss_newton(torch.zeros(2), torch.ones(2), 2 * torch.eye(2))
        tensor([-0.5000, -0.5000])
    """
    return quadratic_proximal(theta, gradient, ggn, fsd_weight=fsd_weight, wsd_weight=0.0)


def damped_gauss_newton(
    theta: Tensor, gradient: Tensor, ggn: Tensor, *, wsd_weight: float, fsd_weight: float = 1.0
) -> Tensor:
    r"""Loss to first, its Bregman divergence to second order, with WSD.

    .. math:: \theta' = \theta - (\lambda_{\mathrm{FSD}} Z^\top H_z Z + \lambda_{\mathrm{WSD}} I)^{-1}
              \nabla \mathcal J

    Example:
        >>> damped_gauss_newton(torch.zeros(2), torch.ones(2), torch.eye(2), wsd_weight=1.0)
        tensor([-0.5000, -0.5000])
    """
    return quadratic_proximal(theta, gradient, ggn, fsd_weight=fsd_weight, wsd_weight=wsd_weight)


def direct_proximal(
    cost: ScalarFunction, theta: Tensor, function_discrepancy: ScalarFunction, *, fsd_weight: float, wsd_weight: float
) -> Tensor:
    r"""No approximation: the proximal point itself (Eq. 3).

    Example:
        >>> old = torch.ones(1, dtype=torch.float64)
        >>> def cost(u):
        ...     return u.square().sum() / 2
        >>> def moved(u):
        ...     return (u - old).square().sum() / 2
        >>> direct_proximal(cost, old, moved, fsd_weight=0.5, wsd_weight=0.5)
        tensor([0.5000], dtype=torch.float64)
    """
    return exact_proximal_point(
        cost, theta, function_discrepancy=function_discrepancy, fsd_weight=fsd_weight, wsd_weight=wsd_weight
    )
