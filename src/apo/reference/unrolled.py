r"""The proximal meta-objective and its gradient by brute force: autograd through the unrolled step.

.. math:: \mathcal{Q}(\phi) = \mathcal{J}_{\mathcal B}(\theta'(\phi))
          + \frac{\lambda_{\mathrm{FSD}}}{|\mathcal B'|} \sum_{\tilde x \in \mathcal B'}
          \rho(f(\tilde x, \theta'(\phi)), f(\tilde x, \theta))
          + \frac{\lambda_{\mathrm{WSD}}}{2} \|\theta'(\phi) - \theta\|^2 \qquad \text{(Algorithm 1, Eq. 8)}

This is the paper's method: build :math:`\theta'(\phi)` with its graph, run the model on it, differentiate. It needs the
memory of the unrolled graph and a model that can be called functionally. It is the oracle for the tests of the
meta-step, which needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from apo.discrepancy import Discrepancy

Parameters = Mapping[str, Tensor]
"""Tensors by name."""

Randomness = int | Tensor | None
"""A seed, a state from ``torch.get_rng_state()``, or ``None`` for the current state."""


class ProximalTerms(NamedTuple):
    r"""The terms of :math:`\mathcal Q`, each without its weight, and their weighted sum.

    Attributes:
        total: :math:`\mathcal Q` itself.
        loss: The loss on the batch, with the coupled weight decay :math:`\sum_i \tfrac{w_i}{2} \|\theta'_i\|^2`.
        fsd: The mean discrepancy of the outputs on the FSD batch.
        wsd: Half the squared distance in weight space.

    Example:
        >>> ProximalTerms(*(torch.tensor(1.0) for _ in range(4))).fsd.item()
        1.0
    """

    total: Tensor
    loss: Tensor
    fsd: Tensor
    wsd: Tensor


def proximal_objective(
    model: nn.Module,
    theta: Parameters,
    theta_prime: Parameters,
    *,
    loss: Callable[..., Tensor],
    batch: tuple[Any, Any],
    fsd_batch: tuple[Any, Any] | None,
    discrepancy: Discrepancy | None,
    fsd_weight: float,
    wsd_weight: float,
    weight_decay: float | Mapping[str, float] = 0.0,
    loss_randomness: Randomness = None,
    fsd_randomness: Randomness = None,
    fsd_mask: Tensor | None = None,
) -> ProximalTerms:
    r"""Evaluate the proximal objective (Eq. 3, and Eq. 8 for one batch) at :math:`\theta'`.

    The model's parameters, buffers and mode and the random number generators are not changed.

    Args:
        model: Any module; parameters that ``theta`` does not name keep the model's values.
        theta: The old weights by name.
        theta_prime: The new weights by name, which may carry a graph.
        loss: ``loss(outputs, target)``, a scalar.
        batch: ``(inputs, target)`` of the loss term; a tuple of inputs is passed as positional arguments, a mapping as
            keywords.
        fsd_batch: ``(inputs, target)`` of the FSD term; only discrepancies that need the target use it. None leaves the
            term out.
        discrepancy: The divergence of the outputs.
        fsd_weight: :math:`\lambda_{\mathrm{FSD}}`.
        wsd_weight: :math:`\lambda_{\mathrm{WSD}}`.
        weight_decay: Coupled decay, which is part of the loss: one coefficient, or one for each name.
        loss_randomness: Seed or state for the forward pass of the loss term; pass the step's own to get the same
            dropout masks. On a GPU pass a seed.
        fsd_randomness: Seed or state for both forward passes of the FSD term.
        fsd_mask: Mask for the discrepancy.

    Example:
        >>> from apo.discrepancy import SquaredError
        >>> model, x = nn.Linear(2, 1), torch.ones(4, 2)
        >>> theta = parameters_of(model)
        >>> moved = {name: value + 1 for name, value in theta.items()}
        >>> terms = proximal_objective(
        ...     model,
        ...     theta,
        ...     moved,
        ...     loss=nn.functional.mse_loss,
        ...     batch=(x, torch.zeros(4, 1)),
        ...     fsd_batch=(x, None),
        ...     discrepancy=SquaredError(),
        ...     fsd_weight=0.1,
        ...     wsd_weight=0.0,
        ... )
        >>> round(terms.fsd.item(), 4), terms.wsd.item()
        (4.5, 1.5)
    """
    inputs, target = batch
    outputs = _forward(model, theta_prime, inputs, loss_randomness)
    loss_term = loss(outputs, target) + _decay(theta_prime, weight_decay)
    fsd_term = torch.zeros_like(loss_term)
    if fsd_batch is not None and discrepancy is not None:
        inputs, target = fsd_batch
        # Both forward passes must start from the same state, or dropout would count as a discrepancy.
        randomness = torch.get_rng_state() if fsd_randomness is None else fsd_randomness
        new = _forward(model, theta_prime, inputs, randomness)
        with torch.no_grad():
            old = _forward(model, theta, inputs, randomness)
        fsd_term = discrepancy(new, old, fsd_mask, target=target)
    distances = [(theta_prime[name] - theta[name]).square().sum() for name in theta_prime]
    wsd_term = torch.stack(distances).sum() / 2
    total = loss_term + fsd_weight * fsd_term + wsd_weight * wsd_term
    return ProximalTerms(total, loss_term, fsd_term, wsd_term)


def unrolled_meta_gradient(
    model: nn.Module,
    update: Callable[[Parameters, Parameters], Parameters],
    phi: Parameters,
    *,
    theta: Parameters | None = None,
    **objective: Any,
) -> tuple[ProximalTerms, dict[str, Tensor]]:
    r"""Differentiate :math:`\mathcal Q(\phi)` through :math:`\theta'(\phi)` and the model.

    Args:
        model: See :func:`proximal_objective`.
        update: Maps ``(theta, phi)`` to the new weights by name, differentiably in ``phi``, with the gradient of the
            batch and the optimizer's state as constants.
        phi: Meta-parameters by name, such as ``{"lr": ...}``.
        theta: The old weights; the model's trainable parameters by default.
        **objective: The keyword arguments of :func:`proximal_objective`.

    Returns:
        The terms of the objective (detached) and the gradient for each entry of ``phi``.

    Example:
        >>> model, x, y = nn.Linear(2, 1), torch.ones(4, 2), torch.ones(4, 1)
        >>> grad = batch_gradient(model, loss=nn.functional.mse_loss, batch=(x, y))
        >>> def sgd_step(theta, phi):
        ...     return {name: theta[name] - phi["lr"] * grad[name] for name in theta}
        >>> terms, meta = unrolled_meta_gradient(
        ...     model,
        ...     sgd_step,
        ...     {"lr": torch.tensor(0.01)},
        ...     loss=nn.functional.mse_loss,
        ...     batch=(x, y),
        ...     fsd_batch=None,
        ...     discrepancy=None,
        ...     fsd_weight=0.0,
        ...     wsd_weight=0.0,
        ... )
        >>> meta["lr"].item() < 0
        True
    """
    theta = parameters_of(model) if theta is None else {name: t.detach() for name, t in theta.items()}
    leaves = {name: value.detach().clone().requires_grad_() for name, value in phi.items()}
    terms = proximal_objective(model, theta, update(theta, leaves), **objective)
    gradients = torch.autograd.grad(terms.total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return ProximalTerms(*(term.detach() for term in terms)), dict(zip(leaves, gradients, strict=True))


def batch_gradient(
    model: nn.Module,
    *,
    loss: Callable[..., Tensor],
    batch: tuple[Any, Any],
    theta: Parameters | None = None,
    randomness: Randomness = None,
) -> dict[str, Tensor]:
    r"""Return :math:`\nabla_\theta \mathcal J_{\mathcal B}(\theta)` by name without changing the model.

    Parameters that the loss does not depend on get zeros.

    Args:
        model: Any module.
        loss: ``loss(outputs, target)``, a scalar.
        batch: ``(inputs, target)``.
        theta: Where to evaluate; the model's trainable parameters by default.
        randomness: Seed or state for the forward pass.

    Example:
        >>> grad = batch_gradient(nn.Linear(1, 1), loss=lambda z, y: z.sum(), batch=(torch.ones(3, 1), None))
        >>> grad["bias"]
        tensor([3.])
    """
    theta = parameters_of(model) if theta is None else theta
    leaves = {name: value.detach().clone().requires_grad_() for name, value in theta.items()}
    value = loss(_forward(model, leaves, batch[0], randomness), batch[1])
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return detached copies of the model's trainable parameters by name.

    Example:
        >>> list(parameters_of(nn.Linear(1, 1)))
        ['weight', 'bias']
    """
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def _forward(model: nn.Module, theta: Parameters, inputs: Any, randomness: Randomness) -> Any:
    # Cloned, because BatchNorm updates its buffers in place.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, Mapping) else (inputs,)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    with torch.random.fork_rng():
        if isinstance(randomness, int):
            torch.manual_seed(randomness)
        elif randomness is not None:
            torch.set_rng_state(randomness)
        return functional_call(model, {**buffers, **theta}, args, kwargs)


def _decay(theta: Parameters, weight_decay: float | Mapping[str, float]) -> Tensor | float:
    coefficients = weight_decay if isinstance(weight_decay, Mapping) else dict.fromkeys(theta, float(weight_decay))
    return sum((w / 2 * theta[name].square().sum() for name, w in coefficients.items() if w), start=0.0)
