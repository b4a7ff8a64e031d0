r"""The exact proximal point update, and the one-dimensional regression of Figure 1 that illustrates it.

.. math:: \theta^{(t+1)} = \arg\min_u \; \mathcal J_{\mathcal B}(u)
          + \lambda_{\mathrm{FSD}} \mathbb E_{\tilde x}[D_{\mathrm F}(u, \theta^{(t)}, \tilde x)]
          + \frac{\lambda_{\mathrm{WSD}}}{2} \|u - \theta^{(t)}\|^2 \qquad \text{(Eq. 3)}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apo.discrepancy import SquaredError

from .curvature import hessian

ScalarFunction = Callable[[Tensor], Tensor]
"""Maps flat weights ``[m]`` to a scalar."""


def exact_proximal_point(
    cost: ScalarFunction,
    theta: Tensor,
    *,
    function_discrepancy: ScalarFunction | None = None,
    fsd_weight: float = 0.0,
    wsd_weight: float = 0.0,
    tolerance: float = 1e-8,
    max_rounds: int = 20,
) -> Tensor:
    r"""Minimise the proximal objective (Eq. 3) numerically, starting from the old weights.

    L-BFGS with a strong Wolfe line search, then Newton steps, until the gradient's norm is below the tolerance. For a
    non-convex objective the result is a stationary point that descent from :math:`\theta` reaches.

    Args:
        cost: :math:`\mathcal J_{\mathcal B}`, a function of the flat weights.
        theta: The old weights, shape ``[m]``, in float64; float32 cannot reach the tolerance.
        function_discrepancy: :math:`u \mapsto \mathbb E[D_{\mathrm F}(u, \theta)]`.
        fsd_weight: :math:`\lambda_{\mathrm{FSD}}`.
        wsd_weight: :math:`\lambda_{\mathrm{WSD}}`.
        tolerance: The gradient norm to reach.
        max_rounds: The most rounds, each of 300 L-BFGS iterations and a Newton finish.

    Raises:
        RuntimeError: If the tolerance is not reached.

    Example:
        >>> theta = torch.tensor([1.0], dtype=torch.float64)
        >>> exact_proximal_point(lambda u: u.square().sum() / 2, theta, wsd_weight=1.0)
        tensor([0.5000], dtype=torch.float64)
    """
    old = theta.detach()

    def objective(u: Tensor) -> Tensor:
        value = cost(u) + wsd_weight / 2 * (u - old).square().sum()
        return value if function_discrepancy is None else value + fsd_weight * function_discrepancy(u)

    u, norm = old, float("inf")
    for _ in range(max_rounds):
        u = _newton(objective, _lbfgs(objective, u), tolerance)
        norm = float(_gradient(objective, u).norm())
        if norm < tolerance:
            return u
    raise RuntimeError(
        f"the proximal point was not reached in {max_rounds} rounds (gradient norm {norm:.1e}, tolerance "
        f"{tolerance:.1e}): use float64, or raise wsd_weight"
    )


def _lbfgs(objective: ScalarFunction, start: Tensor) -> Tensor:
    """Descend by L-BFGS, which stalls at rounding errors of the objective's value."""
    u = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [u], max_iter=300, history_size=30, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(u)
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    return u.detach()


def _newton(objective: ScalarFunction, start: Tensor, tolerance: float, max_steps: int = 100) -> Tensor:
    """Finish by damped Newton steps; near the minimum the value is rounding noise, so the gradient norm counts too."""
    u, gradient, damping = start, _gradient(objective, start), 1e-8
    for _ in range(max_steps):
        if gradient.norm() < tolerance or damping > 1e8:
            break
        # Absolute eigenvalues turn directions of negative curvature into descent directions.
        eigenvalues, basis = torch.linalg.eigh(hessian(objective, u))
        candidate = u - basis @ ((basis.T @ gradient) / (eigenvalues.abs() + damping))
        candidate_gradient = _gradient(objective, candidate)
        if objective(candidate) < objective(u) or candidate_gradient.norm() < gradient.norm() / 2:
            u, gradient, damping = candidate, candidate_gradient, damping / 10
        else:
            damping *= 100
    return u


def _gradient(objective: ScalarFunction, at: Tensor) -> Tensor:
    u = at.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(objective(u), u)[0]


@dataclass(frozen=True)
class RegressionCurves:
    """The result of :func:`one_dimensional_regression`: everything that Figure 1 shows.

    Attributes:
        data_inputs: Inputs of the fitted data, shape ``[n]``.
        data_targets: Their targets, shape ``[n]``.
        example: Input and target of the one new example.
        grid: Inputs of the curves, shape ``[points]``.
        old: Predictions before the update, shape ``[points]``.
        weights: The ``(fsd_weight, wsd_weight)`` pairs.
        new: Predictions after the exact proximal update, one row for each pair, shape ``[pairs, points]``.
        at_example: Predictions for the new example after each update, shape ``[pairs]``.
        old_at_example: The prediction before.

    Example:
        >>> one_dimensional_regression([(1.0, 1.0)], hidden=8, tolerance=1e-4).new.shape
        torch.Size([1, 201])
    """

    data_inputs: Tensor
    data_targets: Tensor
    example: tuple[float, float]
    grid: Tensor
    old: Tensor
    weights: tuple[tuple[float, float], ...]
    new: Tensor
    at_example: Tensor
    old_at_example: float


def one_dimensional_regression(
    weights: Sequence[tuple[float, float]],
    *,
    example: tuple[float, float] = (0.0, 1.5),
    data_points: int = 24,
    hidden: int = 64,
    seed: int = 0,
    tolerance: float = 1e-6,
) -> RegressionCurves:
    r"""Fit a small network to a curve, then take one exact proximal update on one new example (Figure 1).

    The network has one hidden layer of tanh units. The loss is :math:`\tfrac12 (f(x) - y)^2` on the example, the
    discrepancy half the squared change of the predictions, averaged over the data.

    Args:
        weights: Pairs ``(fsd_weight, wsd_weight)``, one update for each.
        example: Input and target of the new example.
        data_points: Size of the data, evenly spaced over ``[-3, 3]``.
        hidden: Width of the network.
        seed: Of its initial weights.
        tolerance: See :func:`exact_proximal_point`.

    Example:
        >>> curves = one_dimensional_regression([(0.0, 0.1)], hidden=8)
        >>> bool(curves.at_example[0] > curves.old_at_example)
        True
    """
    inputs = torch.linspace(-3, 3, data_points, dtype=torch.float64)
    targets = torch.sin(2 * inputs) / 2
    theta = _fitted_weights(inputs, targets, hidden, seed)
    x, y = torch.tensor([example[0]], dtype=torch.float64), example[1]
    grid = torch.linspace(-3, 3, 201, dtype=torch.float64)
    old, rho = _predict(theta, inputs), SquaredError()
    updated = [
        exact_proximal_point(
            lambda u: (_predict(u, x) - y).square().sum() / 2,
            theta,
            function_discrepancy=lambda u: rho(_predict(u, inputs), old),
            fsd_weight=fsd_weight,
            wsd_weight=wsd_weight,
            tolerance=tolerance,
        )
        for fsd_weight, wsd_weight in weights
    ]
    return RegressionCurves(
        data_inputs=inputs,
        data_targets=targets,
        example=example,
        grid=grid,
        old=_predict(theta, grid),
        weights=tuple(weights),
        new=torch.stack([_predict(u, grid) for u in updated]),
        at_example=torch.cat([_predict(u, x) for u in updated]),
        old_at_example=float(_predict(theta, x)),
    )


def _predict(theta: Tensor, inputs: Tensor) -> Tensor:
    """Evaluate the network on inputs ``[n]``; theta holds slopes, offsets and readout, then the bias."""
    slopes, offsets, readout = theta[:-1].reshape(3, -1)
    return torch.tanh(inputs[:, None] * slopes + offsets) @ readout + theta[-1]


def _fitted_weights(inputs: Tensor, targets: Tensor, hidden: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(3, hidden, generator=generator, dtype=torch.float64)
    # Offsets spread the units over the inputs; the readout is scaled by the width.
    scale = torch.tensor([[2.0], [4.0], [hidden**-0.5]], dtype=torch.float64)
    initial = torch.cat([(draw * scale).reshape(-1), torch.zeros(1, dtype=torch.float64)])
    # Fitting is a proximal point too: staying close to the initial weights keeps the solution smooth.
    return exact_proximal_point(
        lambda u: (_predict(u, inputs) - targets).square().mean(), initial, wsd_weight=1e-3, tolerance=1e-6
    )
