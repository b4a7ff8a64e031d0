"""The optimizer around the blocks: a torch optimizer whose matrices are learned by an APO rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apo.distributed import is_sharded
from apo.preconditioners.bundled import Bundled, Kept
from apo.preconditioners.checks import check_clip, check_factors, check_group, check_warmup
from apo.preconditioners.ownership import LayerByLayer, Ownership, sharing_group
from apo.preconditioners.plan import Layer, Model, trainable_parameters
from apo.preconditioners.replayed import Replayed, pays
from apo.preconditioners.step import move_weights

__all__ = ["Preconditioner"]


class Preconditioner(Optimizer, ABC):
    r"""A step along the preconditioned gradient, :math:`\theta' = \theta - \text{scale} \cdot P g`.

    :math:`P = \eta_0 \hat P`: the user's learning rate times a learned positive semi-definite matrix that starts as the
    identity, with one block per layer. Used alone this is SGD with learning rate ``scale * lr``; a rule of APO changes
    the factors of P. Weights move by

    .. math:: -\text{scale} \cdot \frac{\text{lr}}{\text{reference\_lr}}\, P g

    so that an LR scheduler, which changes only ``lr``, scales the step. APO learns P from the look-ahead :math:`-P g`,
    without scale and schedule: otherwise P would grow while the schedule decays. If the parameters of one layer are in
    groups with different learning rates, P is :math:`D^{1/2} \hat P D^{1/2}` with the rates on the diagonal of D.

    Besides torch's usual entries, each group has the ``initial_step`` (:math:`\eta_0`) and the ``reference_lr`` (the
    ``lr`` at which a schedule's factor is one). Both are the ``lr`` that the group was built with.

    *For a rule.* The meta-parameters are :meth:`factors`. :meth:`displacement` is the look-ahead from the current
    gradients. :meth:`pull_back` turns a cotangent of it into gradients of the factors; it remembers what
    :meth:`displacement` used, so gradients and weights may change in between. Inside :meth:`deferring`, :meth:`step`
    only evaluates the closure, and the rule calls :meth:`take_step` once the factors have changed.

    *For a new structure.* Override :meth:`plan`, which assigns parameters to blocks. Blocks that keep statistics of the
    gradients see those of every step, after it has been computed and before the weights move.

    The arguments are explained at :class:`Kronecker`.

    Attributes:
        ownership: Which process keeps which block; all are on this one unless they are distributed.

    Example:
        >>> from apo.preconditioners import Kronecker
        >>> model = nn.Linear(2, 1, bias=False)
        >>> optimizer = Kronecker(model, lr=0.1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.displacement()  # P is lr times the identity so far
        [tensor([[-0.1000, -0.1000]])]
        >>> [tuple(factor.shape) for factor in optimizer.factors()]
        [(2, 2), (1, 1), (1, 2)]
    """

    #: Whether :meth:`observe_sampled` is to be called on meta-steps.
    wants_sampled_gradients: bool = False

    #: Whether momentum is a running average of P g, so that a gradient moves the weights as far as without.
    _averages_momentum: ClassVar[bool] = False

    _COPIED: ClassVar[tuple[str, ...]] = (
        "_layers", "ownership", "clip", "warmup", "warmup_steps", "_deferred", "_guarded", "_handed_over", "_steps",
    )  # fmt: skip

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
        warmup: Optimizer | None = None,
        warmup_steps: int = 0,
        distribute: bool | None = None,
    ) -> None:
        if not isinstance(model, (nn.Module, Tensor)):
            model = list(model)  # a generator could be read only once
        defaults: dict[str, Any] = {"lr": lr, "scale": scale, "momentum": momentum, "weight_decay": weight_decay}
        defaults["decoupled_weight_decay"] = decoupled_weight_decay
        check_clip(clip)
        super().__init__(trainable_parameters(model) if params is None else params, defaults)
        parameters = self._parameters()
        layers = self.plan(model, parameters)
        check_warmup(warmup, warmup_steps, [p for layer in layers for p in layer.params])
        self.ownership = Ownership(layers, sharing_group(model, parameters, distribute))
        for layer in layers:
            if not self.ownership.is_mine(layer):
                layer.block.release_factors()  # the owner keeps them
        self.layers = layers
        self.clip = clip
        self.warmup = warmup
        self.warmup_steps = warmup_steps
        self._deferred = self._guarded = self._handed_over = False
        self._steps = 0

    @abstractmethod
    def plan(self, model: Model, params: list[Tensor]) -> list[Layer]:
        """Return a layer with a block for every parameter; the constructor calls this once.

        Args:
            model: The network, or parameters that belong to no module.
            params: The parameters to plan, from the param groups.
        """

    @property
    def layers(self) -> list[Layer]:
        """The plan: names, parameters, views and blocks. Assign another list to replace blocks."""
        return self._layers

    @layers.setter
    def layers(self, layers: Sequence[Layer]) -> None:
        self._layers = list(layers)
        self._own_layers = [layer for layer in layers if self.ownership.is_mine(layer)]
        self._planned = {p for layer in layers for p in layer.params}
        self._observes = any(layer.block.statistics for layer in layers)
        # What pull_back() needs: the parameters of the last displacement(), and what the product kept.
        self._look_ahead: tuple[list[Tensor], Kept] | None = None
        self._product: LayerByLayer | Bundled | Replayed
        # Weights are sharded before the optimizer is built, so one look is enough for all steps.
        self._sharded = any(map(is_sharded, self._planned))
        # Bundles and graphs need all factors and whole gradients in one process.
        if self._sharded or self.ownership.size > 1:
            self._product = LayerByLayer(self._layers, self.ownership)
        else:
            self._product = Replayed(self._layers) if pays(self._layers) else Bundled(self._layers)

    # --- what a rule reads ---

    def factors(self) -> list[Tensor]:
        """Return the meta-parameters: the factors of every block kept here, in a fixed order."""
        return [factor for layer in self._own_layers for factor in layer.block.factors.values()]

    def moved(self) -> list[Tensor]:
        """Return the parameters that have a gradient now, in the order of the param groups.

        Raises:
            RuntimeError: If one of them has no block because it was frozen when this optimizer was built.
        """
        moved = [p for p in self._parameters() if p.grad is not None]
        for p in moved:
            if p not in self._planned:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} was frozen when {type(self).__name__} was built and has a "
                    "gradient now: unfreeze it before building the optimizer"
                )
        return moved

    @torch.no_grad()
    def displacement(self) -> list[Tensor]:
        r"""Return the look-ahead :math:`-P g`, one tensor for each parameter in :meth:`moved`.

        g includes coupled weight decay. Scale, momentum, clip, schedule and warm-up do not apply.
        """
        gradients = self._gradients()
        displacements, kept = self._product.multiply(self.param_groups, gradients, look_ahead=True)
        self._look_ahead = list(gradients), kept  # a backward pass may change the gradients before pull_back()
        return [displacements[p] for p in gradients]

    @torch.no_grad()
    def pull_back(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        r"""Return the gradient of :math:`\sum_i \langle h_i, \Delta_i \rangle` with respect to each of :meth:`factors`.

        Args:
            cotangents: One tensor :math:`h_i` for each entry of the last :meth:`displacement`.

        Raises:
            RuntimeError: If :meth:`displacement` was not called since the last step.
            ValueError: If the number of cotangents is wrong.
        """
        if self._look_ahead is None:
            raise RuntimeError("pull_back() differentiates the last displacement(): call displacement() first")
        moved, kept = self._look_ahead
        if len(cotangents) != len(moved):
            raise ValueError(
                f"cotangents must have {len(moved)} entries, as displacement() does, got {len(cotangents)}"
            )
        found = self._product.pull_back(kept, dict(zip(moved, cotangents, strict=True)))
        return [
            found[layer.name][key] if layer.name in found else torch.zeros_like(factor)
            for layer in self._own_layers
            for key, factor in layer.block.factors.items()
        ]

    @torch.no_grad()
    def observe_sampled(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Take gradients at sampled targets, sharded as the parameters are, into the statistics of the blocks."""
        self._product.observe(self.param_groups, gradients, sampled=True)

    # --- steps ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """Evaluate the closure, if any, move the weights unless inside :meth:`deferring`, and return the loss.

        Args:
            closure: Clears gradients, computes the loss, calls backward and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._deferred:
            self.take_step()
        return loss

    @torch.no_grad()
    def take_step(self) -> None:
        """Move the weights once, with the warm-up's optimizer as long as it lasts, and count the step."""
        self._look_ahead = None  # first, to free its memory
        groups = self.param_groups
        if self.warmup is not None and self.warming_up:
            if self._observes:
                self._product.observe(groups, self._gradients())
            self.warmup.step()
        else:
            gradients = self._gradients()
            directions, _ = self._product.multiply(groups, gradients)
            mean_steps = self._mean_steps()
            if self._observes:  # after P was used: it must not depend on the gradient that it multiplies
                self._product.observe(groups, gradients)
            averages = self._averages_momentum
            move_weights(groups, directions, self.state, self.clip, self._sharded, averages, mean_steps)
        self._steps += 1

    def _mean_steps(self) -> dict[Tensor, Tensor] | None:
        """Return the mean eigenvalue of P by parameter if decoupled weight decay needs it, or None."""
        return None

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Make :meth:`step` evaluate only its closure, because a rule calls :meth:`take_step` later."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    @property
    def deferred(self) -> bool:
        """Whether :meth:`step` leaves the weights to :meth:`take_step`."""
        return self._deferred

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return self._steps

    @property
    def warmup_elapsed(self) -> bool:
        """Whether at least ``warmup_steps`` steps were taken."""
        return self._steps >= self.warmup_steps

    @property
    def warming_up(self) -> bool:
        """Whether the next step is the warm-up optimizer's."""
        if self.warmup is None or self._handed_over:
            return False
        return self._guarded or not self.warmup_elapsed

    @property
    def guarded(self) -> bool:
        """Whether the warm-up lasts until :meth:`hand_over`."""
        return self._guarded

    def wait_for_hand_over(self, wait: bool) -> None:
        """Choose whether the warm-up lasts until :meth:`hand_over`, or for ``warmup_steps`` steps."""
        self._guarded = wait

    def hand_over(self) -> None:
        """End the warm-up: from the next step on the preconditioner moves the weights."""
        self._handed_over = True

    def rescale(self, factor: float) -> None:
        """Multiply P by a number, to start at another scale; ``lr`` and schedules keep their meaning."""
        for group in self.param_groups:
            group["initial_step"] *= factor

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; only the constructor may call this."""
        if hasattr(self, "_layers"):  # its parameters would have no block, and the meta-optimizer no factors for them
            raise RuntimeError(
                "add_param_group() must not be called on a preconditioner: build a new one over all groups"
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_group(group)
        group.setdefault("initial_step", group["lr"])
        group.setdefault("reference_lr", group["lr"])

    # --- inspection and checkpoints ---

    def dense_preconditioner(self, name: str) -> Tensor:
        """Return P of one small layer as a matrix ``[n, n]`` that acts on the gathered and flattened gradient.

        Args:
            name: The layer's name, as in ``self.layers``.

        Raises:
            ValueError: If there is no such layer, or another process keeps its block.
        """
        layer = next((layer for layer in self._own_layers if layer.name == name), None)
        if layer is None:
            known = ", ".join(layer.name for layer in self._own_layers)
            raise ValueError(f"name must be a layer whose block this process keeps, got {name!r}: pass one of {known}")
        dtype = next(iter(layer.block.factors.values())).dtype
        initial = {p: group["initial_step"] for group in self.param_groups for p in group["params"]}
        steps = [torch.full(p.shape, initial[p], dtype=dtype, device=p.device) for p in layer.params]
        root = layer.view.gather(steps).reshape(-1).sqrt()
        return root.unsqueeze(1) * layer.block.to_dense() * root

    def to_dense(self) -> dict[str, Tensor]:
        """Return :meth:`dense_preconditioner` of every layer whose block is kept here; only for small models."""
        return {layer.name: self.dense_preconditioner(layer.name) for layer in self._own_layers}

    def summary(self) -> dict[str, Tensor]:
        """Return the mean eigenvalue of each layer's learned matrix, 1 at the start, as tensors on the device.

        If the blocks are distributed, all processes have to call this.
        """
        return self._product.mean_eigenvalues()

    def state_dict(self) -> dict[str, Any]:
        """Return a torch optimizer's state, and factors and statistics by layer; tensors share the optimizer's memory.

        All entries are tensors and plain values, so ``torch.load(..., weights_only=True)`` can read them.
        """
        return {
            **super().state_dict(),
            "preconditioner": {
                "factors": {layer.name: layer.block.tensors for layer in self._own_layers},
                "steps": self._steps,
                "handed_over": self._handed_over,
                "warmup": None if self.warmup is None else self.warmup.state_dict(),
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned.

        Factors are copied into the existing tensors, so that a meta-optimizer that holds them stays valid.

        Args:
            state_dict: From an optimizer of the same structure over the same model.

        Raises:
            ValueError: If it belongs to another optimizer; then nothing is changed.
        """
        own = state_dict.get("preconditioner")
        if own is None:
            raise ValueError(f"state_dict must be from a {type(self).__name__}, got one with no entry 'preconditioner'")
        check_factors(self.layers, own["factors"], self.ownership)
        if (self.warmup is None) != (own["warmup"] is None):
            raise ValueError("state_dict and optimizer differ in warmup: build the optimizer as the saved one was")
        super().load_state_dict(state_dict)
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for key, p in zip(ids, self._parameters(), strict=True):
            buffer = state_dict["state"].get(key, {}).get("momentum_buffer")
            if buffer is not None:  # torch converted it to the parameter's type, which may be narrower
                self.state[p]["momentum_buffer"] = buffer.to(p.device, copy=True)
        for layer in self._own_layers:
            for key, tensor in layer.block.tensors.items():
                tensor.copy_(own["factors"][layer.name][key])
        self._steps = own["steps"]
        self._handed_over = own["handed_over"]
        self._look_ahead = None
        if self.warmup is not None:
            self.warmup.load_state_dict(own["warmup"])

    def __getstate__(self) -> dict[str, Any]:
        # torch copies and pickles only three attributes of an optimizer.
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in self._COPIED}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_layers" in state:  # in a copy the factors may no longer share memory with their bundle
            self.layers = self._layers

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _gradients(self) -> dict[Tensor, Tensor]:
        """Return the gradient of every parameter that has one, dense."""
        return {p: p.grad.to_dense() if p.grad.is_sparse else p.grad for p in self.moved()}  # type: ignore[union-attr]
