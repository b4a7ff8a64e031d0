"""The optimizer with EKFAC-shaped blocks: the paper's APO-Precond."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from apo.preconditioners.optimizer import Preconditioner

__all__ = ["Kronecker"]


@final
class Kronecker(Preconditioner):
    r"""A preconditioner with one Kronecker-structured block per layer, for networks of any size.

    For the gradient G ``[out, in + 1]`` of a layer's weight and bias the step is along
    :math:`B (S^2 \odot B^\top G A) A^\top`, the paper's :math:`P_S`; see :class:`KroneckerBlock`. Which block
    each kind of module gets is listed in :mod:`apo.preconditioners.modules`; no parameter is left out.

    Args:
        model: The network, or a parameter or list of parameters that belong to no module.
        lr: The step size :math:`\eta_0` that P starts from, :math:`P = \eta_0 I`.
        params: Param groups in torch's form, for options per group or for a part of the model; parameters
            that are not in them stay as they are. By default everything that requires gradients, in one
            group.
        scale: Constant factor on every update; 0.9 is the paper's.
        momentum: Coefficient of heavy-ball momentum on the preconditioned gradient.
        clip: Largest Euclidean norm of an update of all weights together, momentum included.
        weight_decay: Coefficient; coupled, it adds ``weight_decay * theta`` to the gradient before P.
        decoupled_weight_decay: Whether decay multiplies the weights by ``1 - lr * weight_decay`` instead.
        conv: ``"matrix"`` for the paper's view of a convolution, or ``"factored"`` for separate factors of
            input channels and kernel positions, far smaller and faster for wide layers.
        max_dim: The longest side of a layer that gets a dense factor. The default keeps every layer of the
            usual image networks dense; one factor of that size takes 256 MiB in float32, and so do each of
            the two buffers of an Adam that learns it.
        matmul: Precision of the products with the factors, which themselves stay in float32. ``"float32"`` leaves it
            to torch's own setting; ``"tf32"`` lets CUDA's tensor cores round the operands to 10 bits, for these
            products alone; ``"bfloat16"`` rounds operands and results to 8 bits.
        warmup: An optimizer over the same parameters that moves them at first while P is already being
            learned.
        warmup_steps: The number of its steps.
        distribute: Whether the processes that train the network together share its blocks, so that each keeps
            and multiplies only its part of them. None shares under ``fully_shard`` alone. Checkpoints are then a
            matter of all processes, see :mod:`apo.integrations.distributed`.

    Example:
        >>> import torch
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
        model: nn.Module | Tensor | Iterable[Tensor],
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
        super().__init__(
            model,
            lr,
            params=params,
            scale=scale,
            momentum=momentum,
            clip=clip,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            conv=conv,
            max_dim=max_dim,
            matmul=matmul,
            warmup=warmup,
            warmup_steps=warmup_steps,
            distribute=distribute,
        )

    @property
    def structure(self) -> str:
        """The shape of P, ``"kronecker"``."""
        return "kronecker"
