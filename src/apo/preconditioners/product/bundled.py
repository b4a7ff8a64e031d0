"""The product P g for similar layers together: few launches, however many layers there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from apo.preconditioners.plan import Layer
from apo.preconditioners.product.bundles import Bundle, Single, bundle_layers
from apo.preconditioners.product.direction import Direction, Groups, Rates, initial_steps
from apo.preconditioners.product.layout import laid_out_like

__all__ = ["Bundled", "Kept", "raw_gradients"]

_Item = tuple[Bundle, Tensor]

#: What a pull-back needs: the joint gradients, and the factors on the products.
Kept = tuple[list[_Item], Rates]


@final
class Bundled(Direction):
    """Multiplies the gradients of each bundle by its joint block, on one process.

    Args:
        layers: The plan. The factors of its blocks move in memory.

    Example:
        >>> from apo.preconditioners import plan_layers
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> for p in model.parameters():
        ...     p.grad = torch.ones_like(p)
        >>> group = {"params": list(model.parameters()), "initial_step": 0.1, "weight_decay": 0.0}
        >>> Bundled(plan_layers(model)).directions([group])[model[1].bias]
        tensor([0.1000, 0.1000])
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._bundles = bundle_layers(layers)
        self._remembered: Kept = ([], {})

    def directions(self, groups: Groups) -> dict[Tensor, Tensor]:
        """Return P g; each tensor has the strides of its parameter."""
        return self.multiplied(groups, raw_gradients(groups))

    def displacements(self, groups: Groups) -> dict[Tensor, Tensor]:
        """Return -P g; each tensor has the strides of its parameter."""
        displacements, self._remembered = self.displaced(groups, raw_gradients(groups))
        return displacements

    def pull_back(self, cotangents: Mapping[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Pull back bundle by bundle."""
        return self.pulled_back(self._remembered, cotangents)

    # --- the same as functions of tensors that are given ---

    def multiplied(self, groups: Groups, raw: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return P g for gradients that have no weight decay yet."""
        before, after = initial_steps(self._layers, groups)
        gradients = _scaled(_decayed(groups, raw), before)
        return self._results(gradients, self._gathered(gradients), after)

    def displaced(self, groups: Groups, raw: Mapping[Tensor, Tensor]) -> tuple[dict[Tensor, Tensor], Kept]:
        """Return -P g for gradients that have no weight decay yet, and what :meth:`pulled_back` needs."""
        before, after = initial_steps(self._layers, groups)
        gradients = _scaled(_decayed(groups, raw), before)
        # What a single layer gathers may share memory with .grad, which a backward pass at the look-ahead overwrites.
        kept = [
            (bundle, joint.clone() if isinstance(bundle, Single) else joint)
            for bundle, joint in self._gathered(gradients)
        ]
        rates = {p: -rate for p, rate in after.items()}
        return self._results(gradients, kept, rates), (kept, rates)

    def pulled_back(self, kept: Kept, cotangents: Mapping[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return the gradients of the factors."""
        items, rates = kept
        scaled = _scaled(cotangents, rates)
        found: dict[str, dict[str, Tensor]] = {layer.name: {} for bundle, _ in items for layer in bundle.layers}
        for bundle, gradient in items:
            joint = bundle.gather(scaled)
            assert joint is not None
            for key, value in bundle.block.pull_back(gradient, joint).items():
                for layer, part in zip(bundle.layers, bundle.split(key, value), strict=True):
                    found[layer.name][key] = part
        return found

    def mean_eigenvalues(self) -> dict[str, Tensor]:
        """Return the mean eigenvalues, in the order of the plan."""
        found = {
            layer.name: value
            for bundle in self._standing()
            for layer, value in zip(bundle.layers, bundle.mean_eigenvalues().unbind(), strict=True)
        }
        return {layer.name: found[layer.name] for layer in self._layers}

    def forget(self) -> None:
        """Drop the gradients."""
        self._remembered = ([], {})

    def _gathered(self, gradients: Mapping[Tensor, Tensor]) -> list[_Item]:
        """Return the joint gradients of all bundles that have any."""
        joints = [(bundle, bundle.gather(gradients)) for bundle in self._standing()]
        return [(bundle, joint) for bundle, joint in joints if joint is not None]

    def _results(
        self, gradients: Mapping[Tensor, Tensor], items: Iterable[_Item], rates: Rates
    ) -> dict[Tensor, Tensor]:
        found: dict[Tensor, Tensor] = {}
        for bundle, joint in items:
            found |= zip(bundle.params, bundle.scatter(bundle.block.apply(joint)), strict=True)
        return _scaled({p: found[p] for p in gradients}, rates)

    def _standing(self) -> list[Bundle]:
        """Return the bundles; where someone has exchanged a factor, its layers one by one."""
        return [
            part
            for bundle in self._bundles
            for part in ([bundle] if bundle.holds() else [Single(layer) for layer in bundle.layers])
        ]


def raw_gradients(groups: Groups) -> dict[Tensor, Tensor]:
    """Return the gradients that there are, dense."""
    with_gradients = [p for group in groups for p in group["params"] if p.grad is not None]
    return {p: p.grad.to_dense() if p.grad.is_sparse else p.grad for p in with_gradients}  # type: ignore[union-attr]


def _decayed(groups: Groups, raw: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Add coupled weight decay to gradients."""
    found: dict[Tensor, Tensor] = {}
    for group in groups:
        params = [p for p in group["params"] if p in raw]
        gradients = [raw[p] for p in params]
        if params and group["weight_decay"] and not group["decoupled_weight_decay"]:
            gradients = [laid_out_like(gradient, p) for gradient, p in zip(gradients, params, strict=True)]
            gradients = torch._foreach_add(gradients, params, alpha=group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
        found |= zip(params, gradients, strict=True)
    return found


def _scaled(tensors: Mapping[Tensor, Tensor], rates: Rates) -> dict[Tensor, Tensor]:
    """Multiply each tensor by its rate; where there is none, or it is 1, the tensor stays as it is."""
    chosen = [p for p in tensors if rates.get(p, 1.0) != 1.0]
    if not chosen:
        return dict(tensors)
    scaled = torch._foreach_mul([tensors[p] for p in chosen], [rates[p] for p in chosen])  # pyright: ignore[reportPrivateImportUsage]
    return {**tensors, **dict(zip(chosen, scaled, strict=True))}
