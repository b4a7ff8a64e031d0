"""The four optimizers, which differ in the layers that they plan; an eigenbasis also changes with its statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from apo.arguments import whole_number
from apo.preconditioners.eigenbasis_block import EigenbasisBlock
from apo.preconditioners.optimizer import Preconditioner
from apo.preconditioners.plan import (
    EIGENBASIS_MEMORY,
    Choices,
    Layer,
    Model,
    diagonal_plan,
    full_plan,
    kronecker_plan,
)

__all__ = ["Diagonal", "Eigenbasis", "Full", "Kronecker"]

#: After these steps the bases of an eigenbasis are computed, not improved: the first statistics change quickly.
_EXACT = (10, 30, 100)


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
            model, lr, params=params, scale=scale, momentum=momentum, clip=clip, weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay, warmup=warmup, warmup_steps=warmup_steps,
            distribute=distribute,
        )  # fmt: skip

    def plan(self, model: Model, params: list[Tensor]) -> list[Layer]:
        """Plan each parameter by the kind of module that owns it."""
        return kronecker_plan(model, params, self._choices)


@final
class Eigenbasis(Preconditioner):
    r"""A preconditioner in the eigenbasis of gradient statistics, with two learned numbers per layer.

    For the gradient :math:`g_W` ``[out, in + 1]`` of a layer's weight and bias the step is along

    .. math:: \eta_0\, r\, U \big( (U^\top g_W R) \oslash (V / \operatorname{mean} V + \delta) \big) R^\top

    where U and R are eigenvectors of running averages of :math:`g_W g_W^\top` and :math:`g_W^\top g_W`, and V is the
    running average of the squares of :math:`U^\top g_W R`; see :class:`EigenbasisBlock`. The statistics are gathered at
    every step. APO learns the rate r and the damping :math:`\delta` of each layer: with a large damping the layer moves
    along the gradient, with a small one each direction's gradient is divided by its second moment, its curvature. Two
    numbers cannot fit the noise of single batches, as a learned matrix can, and they change by orders of magnitude
    within a few dozen meta-steps.

    The rows of the table in :mod:`apo.preconditioners.plan` say which matrix a module's gradient is. Embeddings,
    normalisation layers and single numbers have no basis: there V is a second moment per weight.

    :class:`apo.Preconditioned` has defaults for it, with which it needs neither a rate nor a schedule.

    Args:
        model: The network, or a parameter or list of parameters that belong to no module.
        lr: The step size :math:`\eta_0` to start from; a warm start, the default of the rule, replaces it.
        params: Param groups, see :class:`Kronecker`.
        scale: Constant factor on every update.
        momentum: Coefficient of a running average of the preconditioned gradient. It delays the effect of a gradient
            and does not enlarge it, so r keeps its meaning.
        clip: Largest Euclidean norm of an update of all weights; None for no limit.
        weight_decay: Coefficient of coupled decay, which adds ``weight_decay * theta`` to the gradient before P, and so
            is weak in directions in which P is small.
        decoupled_weight_decay: Whether to multiply the weights of a layer by ``1 - weight_decay * step`` instead, where
            ``step`` is the mean eigenvalue of its P (times scale and schedule): the decay follows the learned rate, and
            is as strong in all directions as the coupled one is on average.
        refresh_interval: Steps between changes of the bases. Then they are improved by one QR decomposition, and V is
            rotated. After 10, 30 and 100 steps they are computed by an eigendecomposition.
        memory: Coefficient of the running averages.
        statistics: What U, R and V are statistics of: the ``"gradients"`` of training steps, or, for ``"fisher"``,
            gradients at targets that are drawn from the network's outputs, one more forward and backward pass per
            meta-step. The second is a curvature also where the loss is nearly zero, as in regression.
        conv: ``"auto"`` views a convolution as a matrix, and if its rows are longer than ``max_dim`` factors it, with
            one basis for input channels and one for kernel positions. ``"matrix"`` and ``"factored"`` do the same with
            all.
        max_dim: The longest side of a layer that gets a basis.
        matmul: Precision of the products with the bases, see :class:`Kronecker`. Statistics stay in float32.
        warmup: An optimizer over the same parameters that takes the first steps while statistics are gathered and the
            numbers are learned.
        warmup_steps: The number of these steps.
        distribute: Whether to divide the blocks among the processes, see :class:`Kronecker`.

    Example:
        >>> import apo, torch
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> optimizer = Eigenbasis(model)
        >>> tuner = apo.APO(optimizer, model, torch.nn.functional.mse_loss, total_steps=60)
        >>> x = torch.randn(16, 4)
        >>> losses = [float(tuner.step(x, x.sum(1, keepdim=True))) for _ in range(60)]
        >>> losses[-1] < 0.1 * losses[0], len(optimizer.factors())  # two numbers for each of two layers
        (True, 4)
    """

    _averages_momentum: ClassVar[bool] = True
    _COPIED: ClassVar[tuple[str, ...]] = (*Preconditioner._COPIED, "refresh_interval", "wants_sampled_gradients")

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
        refresh_interval: int = 200,
        memory: float = EIGENBASIS_MEMORY,
        statistics: str = "gradients",
        conv: str = "auto",
        max_dim: int = 1200,
        matmul: str = "float32",
        warmup: Optimizer | None = None,
        warmup_steps: int = 0,
        distribute: bool | None = None,
    ) -> None:
        if statistics not in ("gradients", "fisher"):
            raise ValueError(f"statistics must be 'gradients' or 'fisher', got {statistics!r}")
        self.wants_sampled_gradients = statistics == "fisher"
        self._choices = Choices(conv, max_dim, matmul, memory, self.wants_sampled_gradients)
        self.refresh_interval = whole_number("refresh_interval", refresh_interval)
        super().__init__(
            model, lr, params=params, scale=scale, momentum=momentum, clip=clip, weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay, warmup=warmup, warmup_steps=warmup_steps,
            distribute=distribute,
        )  # fmt: skip

    def plan(self, model: Model, params: list[Tensor]) -> list[Layer]:
        """Plan each parameter by the kind of module that owns it."""
        return kronecker_plan(model, params, self._choices)

    @torch.no_grad()
    def take_step(self) -> None:
        """Move the weights once, and change the bases if it is time."""
        super().take_step()
        if self.steps in _EXACT or self.steps % self.refresh_interval == 0:
            self.refresh(exact=self.steps in _EXACT)

    def refresh(self, exact: bool = False) -> None:
        """Change to bases that fit the present statistics.

        Args:
            exact: Compute eigenvectors, instead of one step of orthogonal iteration from the present ones.
        """
        for layer in self._own_layers:
            if isinstance(layer.block, EigenbasisBlock):
                layer.block.refresh(exact)

    @torch.no_grad()
    def scale_rates(self, log_factor: float) -> None:
        """Multiply the rates of all layers by a number, given by its logarithm."""
        for layer in self._own_layers:
            if isinstance(layer.block, EigenbasisBlock):
                layer.block.factors["log_rate"].add_(log_factor)
                layer.block.constrain()

    def _mean_steps(self) -> dict[Tensor, Tensor] | None:
        if not any(group["decoupled_weight_decay"] and group["weight_decay"] for group in self.param_groups):
            return None
        initial = {p: group["initial_step"] for group in self.param_groups for p in group["params"]}
        means = self._product.mean_eigenvalues()
        return {p: initial[p] * means[layer.name] for layer in self.layers for p in layer.params}


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
            model, lr, params=params, scale=scale, momentum=momentum, clip=clip, weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay, warmup=warmup, warmup_steps=warmup_steps,
        )  # fmt: skip

    def plan(self, model: Model, params: list[Tensor]) -> list[Layer]:
        """Plan all parameters together."""
        return full_plan(model, params, self._choices)
