r"""What KFAC and EKFAC share: observing layers, collecting statistics of the true Fisher, and the step.

A training step with either of them is

.. code-block:: python

    output = model(inputs)  # the layers' inputs and outputs are noted
    optimizer.observe(output, "categorical")  # a backward pass on targets drawn from the network
    loss(output, target).backward()
    optimizer.step()

and statistics are collected only if ``optimizer.wants_statistics`` is true. The weights move by

.. math:: \theta \leftarrow \theta - \eta\, m, \qquad m \leftarrow \mu m + \nu C^{-1} (g + \lambda\theta)

with the curvature :math:`C` of each layer, momentum :math:`\mu`, L2 coefficient :math:`\lambda` and, if a KL clip
:math:`\kappa` is given, :math:`\nu = \min(1, \sqrt{\kappa / (\eta^2 \langle C^{-1} g, g \rangle)})`. Parameters without
factored curvature (norms, embeddings) take the gradient as it is. Statistics are kept in float32 for 16-bit networks.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from apo_experiments.baselines.fisher import sampled_score
from apo_experiments.baselines.layers import FactoredLayer, factored_layers


class CurvatureOptimizer(Optimizer, ABC):
    """An optimizer with one block of curvature per layer.

    Args:
        model: The network; its linear layers and convolutions get a block.
        lr: Step size.
        momentum: Coefficient of heavy-ball momentum on the preconditioned gradient.
        damping: Added to the curvature, see the subclass.
        weight_decay: Coefficient of an L2 penalty.
        ema: The most weight that old statistics keep: the k-th observation gets ``max(1 / k, 1 - ema)``.
        statistics_interval: Steps between observations.
        inverse_interval: Steps between inversions or eigendecompositions.
        kl_clip: Bound on the squared length of a step in the Fisher metric, None for none.
        seed: Of the targets that are drawn.

    Attributes:
        layers: The layers with a block.
        steps: How many steps were taken.
        observations: How many times statistics were gathered.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        *,
        momentum: float = 0.9,
        damping: float = 1e-2,
        weight_decay: float = 0.0,
        ema: float = 0.95,
        statistics_interval: int = 1,
        inverse_interval: int = 10,
        kl_clip: float | None = None,
        seed: int = 0,
    ) -> None:
        for name, value in (("lr", lr), ("damping", damping), ("kl_clip", kl_clip)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if not (0 <= momentum < 1 and 0 <= ema < 1):
            raise ValueError(f"momentum and ema must be at least 0 and below 1, got {momentum} and {ema}")
        if statistics_interval < 1 or inverse_interval < 1:
            raise ValueError(
                "statistics_interval and inverse_interval must be at least 1, "
                f"got {statistics_interval} and {inverse_interval}"
            )
        defaults = {"lr": lr, "momentum": momentum, "damping": damping, "weight_decay": weight_decay}
        super().__init__([p for p in model.parameters() if p.requires_grad], defaults)
        self.layers = list(factored_layers(model))
        self.ema, self.kl_clip = ema, kl_clip
        self.statistics_interval, self.inverse_interval = statistics_interval, inverse_interval
        self.steps = 0
        self.observations = 0
        self._blocks: list[dict[str, Tensor]] = [{} for _ in self.layers]
        self._momentum: dict[int, Tensor] = {}
        self._calls: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        self._generator = torch.Generator(self._parameters()[0].device).manual_seed(seed)
        for index, layer in enumerate(self.layers):
            layer.module.register_forward_hook(functools.partial(self._note, index))

    # ------------------------------------------------------------------ what a subclass says

    def _update_statistics(
        self, block: dict[str, Tensor], layer: FactoredLayer, a: Tensor, g: Tensor, cases: Tensor | float
    ) -> None:
        """Take in activations ``[batch, shared, in]`` and output gradients ``[batch, shared, out]`` of M ``cases``."""
        a, g = a.flatten(0, 1), g.flatten(0, 1)
        self._average(block, "omega", a.T @ a / cases)
        self._average(block, "gamma", g.T @ g / len(g))

    @abstractmethod
    def _refresh(self, block: dict[str, Tensor], layer: FactoredLayer) -> None:
        """Invert or decompose what the statistics say now."""

    @abstractmethod
    def _precondition(self, block: dict[str, Tensor], gradient: Tensor) -> Tensor:
        """Multiply a gradient ``[out, in]`` by the inverse curvature."""

    # ------------------------------------------------------------------ statistics

    @property
    def wants_statistics(self) -> bool:
        """Whether the coming step wants :meth:`observe` to be called."""
        return self.steps % self.statistics_interval == 0

    def observe(self, output: Tensor, kind: str = "categorical", *, scale: float = 1.0) -> None:
        """Gather statistics of the true Fisher from the forward pass that made ``output``.

        Args:
            output: The network's output, with its graph; classes are the last dimension, examples the first.
            kind: ``"categorical"``, ``"bernoulli"`` or ``"gaussian"`` (unit variance).
            scale: If the training loss is this multiple of the negative log-likelihood of an example, the curvature
                is that of the loss.
        """
        dtype = torch.promote_types(output.dtype, torch.float32)
        score = sampled_score(output.detach().to(dtype), kind, self._generator) * scale**0.5
        self.observe_gradient(output, score, output[..., 0].numel() if kind == "categorical" else output.shape[0])

    def observe_gradient(self, output: Tensor, gradient: Tensor, cases: Tensor | float) -> None:
        r"""Gather statistics of :math:`\frac{1}{M}\sum_m J_m^\top s_m s_m^\top J_m` for given :math:`s`.

        Args:
            output: See :meth:`observe`.
            gradient: :math:`s`, of the output's shape: not divided by the size of the batch.
            cases: M, the number of cases over which the training loss is averaged.
        """
        outputs = [made for calls in self._calls for _, made in calls]
        if not outputs:
            raise RuntimeError("observe() found no forward pass: run the network in a step that wants_statistics first")
        found = torch.autograd.grad(output, outputs, gradient.to(output.dtype), retain_graph=True, allow_unused=True)
        self.observations += 1
        remaining = iter(found)  # each layer takes as many of them as it was called
        # Under autocast the products of float32 rows would be taken in 16 bit.
        with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
            for block, layer, calls in zip(self._blocks, self.layers, self._calls, strict=True):
                pairs = [
                    (inputs, made) for (inputs, _), made in zip(calls, remaining, strict=False) if made is not None
                ]
                if pairs:
                    # A layer that is used several times shares its weight between uses as between locations.
                    a = torch.cat([layer.activations(inputs) for inputs, _ in pairs], dim=1)
                    g = torch.cat([layer.output_gradients(made) for _, made in pairs], dim=1)
                    self._update_statistics(block, layer, a, g, cases)
        self._calls = [[] for _ in self.layers]

    def _average(self, block: dict[str, Tensor], name: str, value: Tensor) -> None:
        """Move a running mean: the k-th value gets the weight max(1 / k, 1 - ema)."""
        keep = min(1 - 1 / self.observations, self.ema)
        block[name] = value if name not in block else block[name] * keep + value * (1 - keep)

    def _note(self, index: int, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if torch.compiler.is_compiling():
            return  # a pass that is compiled once for all steps is one without statistics
        if self.wants_statistics and output.requires_grad and torch.is_grad_enabled():
            self._calls[index].append((inputs[0].detach(), output))

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore
        """Move the weights along the preconditioned gradient."""
        with torch.autocast(self._parameters()[0].device.type, enabled=False):
            self._move()
        self._calls = [[] for _ in self.layers]
        self.steps += 1

    def _move(self) -> None:
        if self.observations and (self.steps % self.inverse_interval == 0 or self.observations == 1):
            for block, layer in zip(self._blocks, self.layers, strict=True):
                if block:
                    self._refresh(block, layer)
        group = self.param_groups[0]
        gradients: dict[Tensor, Tensor] = {}
        for p in group["params"]:
            if p.grad is not None:
                dtype = torch.promote_types(p.dtype, torch.float32)
                gradient, decay = p.grad.to(dtype), group["weight_decay"]
                gradients[p] = gradient.add(p.to(dtype), alpha=decay) if decay else gradient
        directions = dict(gradients)
        for block, layer in zip(self._blocks, self.layers, strict=True):
            if block and all(p in gradients for p in layer.parameters):
                matrix = self._precondition(block, layer.join([gradients[p] for p in layer.parameters]))
                directions.update(zip(layer.parameters, layer.split(matrix), strict=True))
        trust: Tensor | float = 1.0
        if self.kl_clip is not None and directions:
            squared = (
                torch.stack([torch.sum(directions[p] * gradients[p]) for p in directions]).sum() * group["lr"] ** 2
            )
            trust = (self.kl_clip / squared.clamp_min(1e-30)).sqrt().clamp_max(1.0)
        for index, p in enumerate(group["params"]):
            if p in directions:
                step = directions[p] * trust
                if group["momentum"]:
                    previous = self._momentum.setdefault(index, torch.zeros_like(step))
                    step = previous.mul_(group["momentum"]).add_(step)
                p.copy_(p.to(step.dtype) - group["lr"] * step)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact resume needs, the stream of drawn targets included."""
        return {
            **super().state_dict(),
            "curvature": {
                "blocks": {layer.name: dict(block) for layer, block in zip(self.layers, self._blocks, strict=True)},
                "momentum": dict(self._momentum),
                "steps": self.steps,
                "observations": self.observations,
                "generator": self._generator.get_state(),
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume exactly where :meth:`state_dict` was called."""
        own = state_dict.get("curvature")
        names = [layer.name for layer in self.layers]
        if own is None or list(own["blocks"]) != names:
            raise ValueError(f"state_dict does not belong to {type(self).__name__} over layers {', '.join(names)}")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "curvature"})
        device = self._parameters()[0].device
        self._blocks = [{key: value.to(device).clone() for key, value in own["blocks"][name].items()} for name in names]
        self._momentum = {int(index): value.to(device).clone() for index, value in own["momentum"].items()}
        self.steps, self.observations = int(own["steps"]), int(own["observations"])
        self._generator.set_state(own["generator"].cpu())

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]
