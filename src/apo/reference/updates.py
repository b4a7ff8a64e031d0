r"""One step of each base optimizer, written from its definition: :math:`\theta' = \theta + \Delta(\eta)`.

Nothing happens in place and every formula is differentiable in the learning rate, so that autograd through a step gives
the exact derivative that a rule's pull-back must reproduce.

All functions take ``theta`` (the weights), ``grad`` (their gradient, same shape), ``state`` (the optimizer's state
*before* the step under the key names of ``torch.optim``, empty before the first step, never written), and the keyword
``lr`` (a float or a scalar tensor). Their other keywords mean the same as in ``torch.optim``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

State = Mapping[str, Any]
"""Optimizer state of one tensor, by torch's key names."""


def sgd(
    theta: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Tensor | float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> Tensor:
    r"""Gradient descent with momentum.

    .. math:: b \leftarrow \mu b + (1 - \tau) g, \qquad \theta' = \theta - \eta b

    The first buffer is :math:`g` itself; Nesterov's variant moves along :math:`g + \mu b`. Weight decay is coupled:
    :math:`g \leftarrow g + w\,\theta`.

    Example:
        >>> sgd(torch.tensor([1.0]), torch.tensor([2.0]), {}, lr=0.1)
        tensor([0.8000])
    """
    grad = grad + weight_decay * theta
    if momentum == 0:
        return theta - lr * grad
    previous = state.get("momentum_buffer")
    buffer = grad if previous is None else momentum * previous + (1 - dampening) * grad
    return theta - lr * (grad + momentum * buffer if nesterov else buffer)


def rmsprop(
    theta: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Tensor | float,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> Tensor:
    r"""RMSprop: the gradient over the root of its mean square.

    .. math:: v \leftarrow \beta v + (1 - \beta) g^2, \; \theta' = \theta - \eta\, g / (\sqrt v + \epsilon)

    :math:`\beta` is torch's ``alpha``. ``centered`` subtracts the squared running mean of the gradient from :math:`v`;
    momentum accumulates the scaled gradient: :math:`b \leftarrow \mu b + g / (\sqrt v + \epsilon)`.

    Example:
        >>> rmsprop(torch.tensor([1.0]), torch.tensor([2.0]), {}, lr=0.05)
        tensor([0.5000])
    """
    grad = grad + weight_decay * theta
    variance = alpha * _before(state, "square_avg", theta) + (1 - alpha) * grad * grad
    if centered:
        mean = alpha * _before(state, "grad_avg", theta) + (1 - alpha) * grad
        variance = variance - mean * mean
    direction = grad / (variance.sqrt() + eps)
    if momentum > 0:
        direction = momentum * _before(state, "momentum_buffer", theta) + direction
    return theta - lr * direction


def adam(
    theta: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Tensor | float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> Tensor:
    r"""Adam with coupled weight decay: :math:`\theta' = \theta - \eta\, \hat m / (\sqrt{\hat v} + \epsilon)`.

    :math:`\hat m, \hat v` are the running first and second moments of the gradient divided by their bias corrections
    :math:`1 - \beta^t`; AMSGrad replaces :math:`v` by its largest value so far.

    Example:
        >>> adam(torch.tensor([1.0]), torch.tensor([2.0]), {}, lr=0.25)
        tensor([0.7500])
    """
    grad = grad + weight_decay * theta
    step = _next_step(state)
    first = betas[0] * _before(state, "exp_avg", theta) + (1 - betas[0]) * grad
    second = betas[1] * _before(state, "exp_avg_sq", theta) + (1 - betas[1]) * grad * grad
    if amsgrad:
        second = torch.maximum(_before(state, "max_exp_avg_sq", theta), second)
    first_hat = first / (1 - betas[0] ** step)
    second_hat = second / (1 - betas[1] ** step)
    return theta - lr * first_hat / (second_hat.sqrt() + eps)


def adamw(
    theta: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Tensor | float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
) -> Tensor:
    r"""Adam with decoupled weight decay: :math:`\theta \leftarrow (1 - \eta w)\,\theta`, then Adam's step.

    Example:
        >>> adamw(torch.tensor([1.0]), torch.tensor([2.0]), {}, lr=0.25, weight_decay=1.0)
        tensor([0.5000])
    """
    step = adam(theta, grad, state, lr=lr, betas=betas, eps=eps, amsgrad=amsgrad) - theta
    return theta * (1 - lr * weight_decay) + step


def nadam(
    theta: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Tensor | float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
) -> Tensor:
    r"""Adam with Nesterov momentum on a schedule :math:`\mu_t = \beta_1 (1 - \tfrac12\, 0.96^{t \psi})`.

    .. math:: \theta' = \theta - \frac{\eta}{\sqrt{\hat v} + \epsilon}
              \Big[ \frac{(1 - \mu_t)\, g}{1 - \prod_{i \le t} \mu_i}
              + \frac{\mu_{t+1}\, m}{1 - \prod_{i \le t+1} \mu_i} \Big]

    Example:
        >>> nadam(torch.tensor([1.0]), torch.tensor([2.0]), {}, lr=0.1)
        tensor([0.8944])
    """
    decay = lr * weight_decay * theta if decoupled_weight_decay else torch.zeros_like(theta)
    grad = grad if decoupled_weight_decay else grad + weight_decay * theta
    step = _next_step(state)
    mu, mu_next = (betas[0] * (1 - 0.5 * 0.96 ** (t * momentum_decay)) for t in (step, step + 1))
    # torch keeps the running product in its default dtype; only the same rounding gives the same last digit.
    product = float(state.get("mu_product", torch.ones(())) * mu)
    first = betas[0] * _before(state, "exp_avg", theta) + (1 - betas[0]) * grad
    second = betas[1] * _before(state, "exp_avg_sq", theta) + (1 - betas[1]) * grad * grad
    denominator = (second / (1 - betas[1] ** step)).sqrt() + eps
    numerator = (1 - mu) / (1 - product) * grad + mu_next / (1 - product * mu_next) * first
    return theta - decay - lr * numerator / denominator


def adamax(
    theta: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Tensor | float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Tensor:
    r"""Adam with the infinity norm.

    .. math:: v \leftarrow \max(\beta_2 v, |g| + \epsilon), \qquad \theta' = \theta - \eta\, \hat m / v

    Example:
        >>> adamax(torch.tensor([1.0]), torch.tensor([2.0]), {}, lr=0.25)
        tensor([0.7500])
    """
    grad = grad + weight_decay * theta
    step = _next_step(state)
    first = betas[0] * _before(state, "exp_avg", theta) + (1 - betas[0]) * grad
    norm = torch.maximum(betas[1] * _before(state, "exp_inf", theta), grad.abs() + eps)
    return theta - lr * first / (1 - betas[0] ** step) / norm


def muon(
    theta: Tensor,
    grad: Tensor,
    state: State,
    *,
    lr: Tensor | float,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    eps: float = 1e-7,
    adjust_lr_fn: str | None = None,
) -> Tensor:
    r"""Muon: momentum with an orthogonalised direction.

    .. math:: \theta' = (1 - \eta w)\,\theta - \eta\, r\, \mathrm{NS}(b)

    :math:`b` is the running mean of the gradient (averaged once more with the gradient for Nesterov), NS the
    Newton-Schulz iteration, and :math:`r = \sqrt{\max(1, m/n)}` for an ``[m, n]`` matrix, or ``0.2 * sqrt(max(m, n))``
    with ``adjust_lr_fn="match_rms_adamw"``. As in torch, only matrices are updated, decay is decoupled and the
    iteration runs in bfloat16.

    Example:
        >>> muon(torch.eye(2), torch.eye(2), {}, lr=0.1, weight_decay=0.0).shape
        torch.Size([2, 2])
    """
    average = momentum * _before(state, "momentum_buffer", theta) + (1 - momentum) * grad
    direction = (1 - momentum) * grad + momentum * average if nesterov else average
    orthogonal = newton_schulz(direction, coefficients=ns_coefficients, steps=ns_steps, eps=eps)
    rows, columns = theta.shape
    ratio = math.sqrt(max(1, rows / columns))
    if adjust_lr_fn == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, columns))
    return theta * (1 - lr * weight_decay) - lr * ratio * orthogonal.to(theta.dtype)


def newton_schulz(matrix: Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    r"""Push the singular values of a matrix towards 1.

    .. math:: X \leftarrow aX + (bXX^\top + c(XX^\top)^2)X

    Args:
        matrix: Shape ``[m, n]``.
        coefficients: :math:`(a, b, c)`.
        steps: The number of iterations.
        eps: Smallest norm to divide by.

    Returns:
        A bfloat16 matrix of shape ``[m, n]``.

    Example:
        >>> newton_schulz(torch.eye(2), coefficients=(1.5, -0.5, 0.0), steps=9, eps=1e-7).float().diag()
        tensor([1., 1.])
    """
    a, b, c = coefficients
    x = matrix.bfloat16()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        # bfloat16 rounds after every operation, so these have to be the fused operations of torch.optim.Muon.
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def preconditioned(
    theta: Tensor, grad: Tensor, state: State, *, preconditioner: Tensor, lr: Tensor | float = 1.0
) -> Tensor:
    r"""Preconditioned gradient step (Eq. 7): :math:`\theta' = \theta - \eta P g` with a dense :math:`P`.

    Args:
        theta: Weights of any shape, with ``m`` elements.
        grad: Their gradient.
        state: Ignored.
        preconditioner: Shape ``[m, m]``, acting on the gradient flattened in torch's row-major order.
        lr: A factor on the step.

    Example:
        >>> preconditioned(torch.zeros(2), torch.ones(2), {}, preconditioner=torch.diag(torch.tensor([1.0, 2.0])))
        tensor([-1., -2.])
    """
    del state
    return theta - lr * (preconditioner @ grad.reshape(-1)).reshape(theta.shape)


def _before(state: State, key: str, like: Tensor) -> Tensor:
    value = state.get(key)
    return torch.zeros_like(like) if value is None else value


def _next_step(state: State) -> float:
    return float(state.get("step", 0)) + 1
