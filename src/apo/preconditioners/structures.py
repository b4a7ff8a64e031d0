"""The three optimizers, which differ only in the layers that they plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from apo.preconditioners.optimizer import Preconditioner
from apo.preconditioners.plan import Choices, Layer, Model, diagonal_plan, full_plan, kronecker_plan

__all__ = ["Diagonal", "Full", "Kronecker"]


@final
class Kronecker(Preconditioner):
    r"""A preconditioner with one Kronecker-structured block per layer, for networks of any size.

    For the gradient :math:`g_W` ``[out, in + 1]`` of a layer's weight and bias the step is along
    :math:`B (S^2 \odot B^\top g_W A) A^\top`, the paper's :math:`P_S`; see :class:`KroneckerBlock`. The block of each
    kind of module is listed in :mod:`apo.preconditioners.plan`; no parameter is left out.

    Args:
        model: The network, or a parameter or list of parameters that belong to no module.
        lr: The step size :math:`\eta_0` that P starts from, :math:`P = \eta_0 I`.
        params: Param groups as in torch, for options per group or for a part of the model; parameters that are not in
            them do not move. By default everything that requires gradients, in one group.
        scale: Constant factor on every update; 0.9 is the paper's.
        momentum: Coefficient of heavy-ball momentum on the preconditioned gradient.
        clip: Largest Euclidean norm of an update of all weights, including momentum; None for no limit.
        weight_decay: Coefficient of coupled decay, which adds ``weight_decay * theta`` to the gradient before P.
        decoupled_weight_decay: Whether to multiply the weights by ``1 - lr * weight_decay`` instead.
        conv: ``"matrix"`` for the paper's view of a convolution, or ``"factored"`` for separate factors of input
            channels and kernel positions, far smaller and faster for wide layers.
        max_dim: The longest side of a layer that gets a dense factor. The default is enough for every layer of common
            image networks. One factor of that size takes 256 MiB in float32, as does each of the two buffers of an Adam
            that learns it.
        matmul: Precision of the products with the factors; the factors stay in float32. ``"float32"`` follows torch's
            global setting, ``"tf32"`` rounds the operands to 10 bits on CUDA's tensor cores, and ``"bfloat16"`` rounds
            operands and results to 8 bits.
        warmup: An optimizer over the same parameters that takes the first steps while P is already being learned.
        warmup_steps: The number of these steps.
        distribute: Whether to divide the blocks among the processes that train the network, so that each keeps and
            applies only some of them. None: only under ``fully_shard``. All processes then have to take part in a
            checkpoint, see :mod:`apo.integrations.distributed`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        >>> optimizer = Kronecker(model, lr=0.1, warmup=sgd, warmup_steps=1)
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(16, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> optimizer.steps, optimizer.warming_up
        (2, False)
    """

    def __init__(
        self,
        model: Model,
        lr: float = 0.1,
        *,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
        scale: float = 0.9,
        momentum: float = 0.0,
        clip: float | None = None,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        conv: str = "matrix",
        max_dim: int = 8192,
        matmul: str = "float32",
        warmup: Optimizer | None = None,
        warmup_steps: int = 0,
        distribute: bool | None = None,
    ) -> None:
        self._choices = Choices(conv, max_dim, matmul)
        super().__init__(
            model,
            lr,
            params=params,
            scale=scale,
            momentum=momentum,
            clip=clip,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            warmup=warmup,
            warmup_steps=warmup_steps,
            distribute=distribute,
        )

    def plan(self, model: Model, params: list[Tensor]) -> list[Layer]:
        """Plan each parameter by the kind of module that owns it."""
        return kronecker_plan(model, params, self._choices)


@final
class Diagonal(Preconditioner):
    r"""A preconditioner :math:`P = \eta_0\, \mathrm{diag}(s)^2` with one learned number per weight.

    The arguments are explained at :class:`Kronecker`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> theta = nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = Diagonal(theta, lr=0.5, scale=1.0)
        >>> theta.square().sum().backward()
        >>> optimizer.step()
        >>> theta.data
        tensor([0., 0.])
    """

    def plan(self, model: Model, params: list[Tensor]) -> list[Layer]:
        """Plan each parameter separately."""
        return diagonal_plan(model, params)


@final
class Full(Preconditioner):
    r"""A preconditioner :math:`P = \eta_0\, C C^\top` over all parameters at once (the paper's Theorem 1).

    Args:
        max_dim: The largest number of parameters, because C has the square of it; more are an error.

    The other arguments are explained at :class:`Kronecker`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> theta = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        >>> optimizer = Full(theta, lr=0.5)
        >>> optimizer.to_dense()["all"]
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]], dtype=torch.float64)
    """

    def __init__(
        self,
        model: Model,
        lr: float = 0.1,
        *,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
        scale: float = 0.9,
        momentum: float = 0.0,
        clip: float | None = None,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        max_dim: int = 4096,
        warmup: Optimizer | None = None,
        warmup_steps: int = 0,
    ) -> None:
        self._choices = Choices(max_dim=max_dim)
        super().__init__(
            model,
            lr,
            params=params,
            scale=scale,
            momentum=momentum,
            clip=clip,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            warmup=warmup,
            warmup_steps=warmup_steps,
        )

    def plan(self, model: Model, params: list[Tensor]) -> list[Layer]:
        """Plan all parameters together."""
        return full_plan(model, params, self._choices)
