"""The optimizer with diagonal blocks: a learned rate for every weight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from apo.preconditioners.optimizer import Preconditioner

__all__ = ["Diagonal"]


@final
class Diagonal(Preconditioner):
    r"""A preconditioner :math:`P = \eta_0\, \mathrm{diag}(s)^2` with one learned number per weight.

    Args:
        model: The network, or a parameter or list of parameters that belong to no module.
        lr: The step size :math:`\eta_0` that P starts from.
        params: Param groups in torch's form; by default everything that requires gradients, in one group.
        scale: Constant factor on every update; 0.9 is the paper's.
        momentum: Coefficient of heavy-ball momentum on the preconditioned gradient.
        clip: Largest Euclidean norm of an update of all weights together, momentum included.
        weight_decay: Coefficient; coupled, it adds ``weight_decay * theta`` to the gradient before P.
        decoupled_weight_decay: Whether decay multiplies the weights by ``1 - lr * weight_decay`` instead.
        warmup: An optimizer over the same parameters that moves them at first while P is already being
            learned.
        warmup_steps: The number of its steps.

    Example:
        >>> import torch
        >>> theta = nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = Diagonal(theta, lr=0.5, scale=1.0)
        >>> theta.square().sum().backward()
        >>> optimizer.step()
        >>> theta.data
        tensor([0., 0.])
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
        warmup: Optimizer | None = None,
        warmup_steps: int = 0,
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
            warmup=warmup,
            warmup_steps=warmup_steps,
        )

    @property
    def structure(self) -> str:
        """The shape of P, ``"diagonal"``."""
        return "diagonal"
