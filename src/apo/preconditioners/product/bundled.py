"""The product P g for similar layers together: few launches, even in a network of many layers.

A network has many layers of few shapes. The products for one layer are small for an accelerator, so launches take most
of the time. Blocks of one shape are therefore *stacked*: their factors become slices of one tensor ``[layers, n, n]``,
their gradients are stacked too, and one batched product computes all of them. Diagonal blocks act elementwise, so they
are concatenated to one long vector whatever their shapes.

The factors of each layer's block stay the same tensor objects; only their memory moves, into the joint tensor. A
meta-optimizer that holds a factor still reads and writes the right numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple, final

import torch
from torch import Tensor

from apo.preconditioners.block import Block
from apo.preconditioners.plan import Layer
from apo.preconditioners.product.direction import Direction
from apo.preconditioners.product.layout import laid_out_like, stacked
from apo.preconditioners.simple_blocks import DiagonalBlock
from apo.preconditioners.step import Groups, Rates, initial_steps
from apo.torch_internals import foreach_add, foreach_div, foreach_mul, foreach_norm

__all__ = ["Bundle", "Bundled", "Chain", "LookAhead", "Single", "Stack", "bundle_layers", "decayed", "raw_gradients"]

# The most elements in the gradients of a bundle. Larger products are efficient on their own, and joining more layers
# would only cost memory for intermediate results.
_LARGEST = 2**24


class LookAhead(NamedTuple):
    """What a pull-back needs: the joint gradient of each bundle, and the rates on the products."""

    gradients: list[tuple[Bundle, Tensor]]
    rates: Rates


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
        self.forget()

    def directions(self, groups: Groups) -> dict[Tensor, Tensor]:
        """Return P g; each tensor has the strides of its parameter."""
        return self.multiplied(groups, raw_gradients(groups))[0]

    def displacements(self, groups: Groups) -> dict[Tensor, Tensor]:
        """Return -P g; each tensor has the strides of its parameter."""
        displacements, self._look_ahead = self.multiplied(groups, raw_gradients(groups), look_ahead=True)
        return displacements

    def pull_back(self, cotangents: Mapping[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Pull back bundle by bundle."""
        return self.pulled_back(self._look_ahead, cotangents)

    def observe(self, groups: Groups, sampled: Mapping[Tensor, Tensor] | None = None) -> None:
        """Update the joint blocks."""
        if sampled is None:
            self.observed(groups, decayed(groups, raw_gradients(groups)))
        else:
            self.observed(groups, sampled, True)

    def mean_eigenvalues(self) -> dict[str, Tensor]:
        """Return the mean eigenvalues, in the order of the plan."""
        found = {}
        for bundle in self._current_bundles():
            found |= zip([layer.name for layer in bundle.layers], bundle.mean_eigenvalues().unbind(), strict=True)
        return {layer.name: found[layer.name] for layer in self._layers}

    def forget(self) -> None:
        """Drop the gradients."""
        self._look_ahead = LookAhead([], {})

    # --- the same as functions of given tensors, for a CUDA graph to record ---

    def multiplied(
        self, groups: Groups, raw: Mapping[Tensor, Tensor], look_ahead: bool = False
    ) -> tuple[dict[Tensor, Tensor], LookAhead]:
        """Return P g for gradients without weight decay; to look ahead, -P g and what :meth:`pulled_back` needs."""
        before, rates = initial_steps(self._layers, groups)
        gradients = _scaled(decayed(groups, raw), before)
        kept: list[tuple[Bundle, Tensor]] = []
        found: dict[Tensor, Tensor] = {}
        for bundle in self._current_bundles():
            joint = bundle.gather(gradients)
            if joint is None:
                continue
            if look_ahead:
                # The gathered tensor of a single layer may share memory with .grad, which the next backward overwrites.
                joint = joint.clone() if isinstance(bundle, Single) else joint
                kept.append((bundle, joint))
            found |= zip(bundle.params, bundle.scatter(bundle.block.apply(joint)), strict=True)
        if look_ahead:
            rates = {p: -rate for p, rate in rates.items()}
        # Only parameters with a gradient move, but a bundle's product has values for the others too.
        return _scaled({p: found[p] for p in gradients}, rates), LookAhead(kept, rates)

    def observed(self, groups: Groups, gradients: Mapping[Tensor, Tensor], sampled: bool = False) -> None:
        """Take gradients, with weight decay unless they are at sampled targets, into the statistics."""
        gradients = _scaled(gradients, initial_steps(self._layers, groups)[0])
        for bundle in self._current_bundles():
            joint = bundle.gather(gradients)
            if joint is not None:
                bundle.block.observe(joint, sampled)

    def pulled_back(self, look_ahead: LookAhead, cotangents: Mapping[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return the gradients of the factors."""
        scaled = _scaled(cotangents, look_ahead.rates)
        found: dict[str, dict[str, Tensor]] = {}
        for bundle, gradient in look_ahead.gradients:
            joint = bundle.gather(scaled)
            assert joint is not None
            found |= {layer.name: {} for layer in bundle.layers}
            for key, value in bundle.block.pull_back(gradient, joint).items():
                for layer, part in zip(bundle.layers, bundle.split(value), strict=True):
                    found[layer.name][key] = part
        return found

    def _current_bundles(self) -> list[Bundle]:
        """Return the bundles; if the user has replaced a factor, the layers of its bundle separately."""
        current: list[Bundle] = []
        for bundle in self._bundles:
            current += [bundle] if bundle.is_current() else [Single(layer) for layer in bundle.layers]
        return current


def raw_gradients(groups: Groups) -> dict[Tensor, Tensor]:
    """Return the gradient of every parameter that has one, dense."""
    with_gradients = [p for group in groups for p in group["params"] if p.grad is not None]
    return {p: p.grad.to_dense() if p.grad.is_sparse else p.grad for p in with_gradients}  # type: ignore[union-attr]


def decayed(groups: Groups, raw: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Add coupled weight decay to gradients."""
    found = dict(raw)
    for group in groups:
        params = [p for p in group["params"] if p in raw]
        if params and group["weight_decay"] and not group["decoupled_weight_decay"]:
            gradients = [laid_out_like(raw[p], p) for p in params]  # see layout.py
            gradients = foreach_add(gradients, params, alpha=group["weight_decay"])
            found |= zip(params, gradients, strict=True)
    return found


def _scaled(tensors: Mapping[Tensor, Tensor], rates: Rates) -> dict[Tensor, Tensor]:
    """Multiply each tensor by its rate; one without a rate, or with rate 1, is not copied."""
    chosen = [p for p in tensors if rates.get(p, 1.0) != 1.0]
    if not chosen:
        return dict(tensors)
    scaled = foreach_mul([tensors[p] for p in chosen], [rates[p] for p in chosen])
    return {**tensors, **dict(zip(chosen, scaled, strict=True))}


class Bundle(ABC):
    """Layers, and one block that acts on the gradients of all of them.

    Args:
        layers: The layers.
        block: The joint block. The factors of the layers' own blocks move into its memory.

    Attributes:
        params: The parameters of the layers, in the order of :meth:`scatter`.

    Example:
        >>> from apo.preconditioners import plan_layers
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
        >>> [(type(bundle).__name__, bundle.block.shape) for bundle in bundle_layers(plan_layers(model))]
        [('Stack', (2, 3, 4)), ('Chain', (6,))]
    """

    def __init__(self, layers: Sequence[Layer], block: Block) -> None:
        self.layers = list(layers)
        self.block = block
        self.params = [p for position in zip(*(layer.params for layer in layers), strict=True) for p in position]
        self._memory: list[tuple[Block, dict[str, int]]] = []
        if len(self.layers) > 1:
            parts = {key: self.split(joint) for key, joint in block.tensors.items()}
            for index, layer in enumerate(self.layers):
                memory = {key: slices[index] for key, slices in parts.items()}
                # Addresses are enough to notice a replaced factor, since the joint block keeps its memory alive.
                layer.block.move_factors(memory)
                self._memory.append((layer.block, {key: part.data_ptr() for key, part in memory.items()}))

    def is_current(self) -> bool:
        """Return whether the layers' factors are still slices of the joint ones: the user may have replaced them."""
        for block, memory in self._memory:
            tensors = block.tensors
            for key, place in memory.items():
                if key not in tensors or tensors[key].data_ptr() != place:
                    return False
        return True

    def gather(self, tensors: Mapping[Tensor, Tensor]) -> Tensor | None:
        """Join the tensors of the parameters for the joint block; None if all are missing, zeros for some.

        The result may share memory with its sources.
        """
        present = [tensors[p] for p in self.params if p in tensors]
        if not present:
            return None
        if len(present) < len(self.params):
            present = [tensors[p] if p in tensors else torch.zeros_like(p) for p in self.params]
        return self._gather(present)

    @abstractmethod
    def scatter(self, joint: Tensor) -> list[Tensor]:
        """Split a joint tensor: one tensor for each of ``self.params``, with its strides."""

    @abstractmethod
    def split(self, joint: Tensor) -> Sequence[Tensor]:
        """Split a tensor shaped like a factor of the joint block: one tensor for each layer."""

    @abstractmethod
    def mean_eigenvalues(self) -> Tensor:
        """Return the mean eigenvalue of the block of each layer, ``[layers]``."""

    @abstractmethod
    def _gather(self, tensors: list[Tensor]) -> Tensor: ...


@final
class Single(Bundle):
    """A single layer, whose own block is the joint one."""

    def __init__(self, layer: Layer) -> None:
        super().__init__([layer], layer.block)

    def scatter(self, joint: Tensor) -> list[Tensor]:
        """Scatter the layer's view."""
        (layer,) = self.layers
        return [laid_out_like(part, p) for part, p in zip(layer.view.scatter(joint), layer.params, strict=True)]

    def split(self, joint: Tensor) -> Sequence[Tensor]:
        """Return the only part."""
        return [joint]

    def mean_eigenvalues(self) -> Tensor:
        """Return the block's mean eigenvalue, ``[1]``."""
        return self.block.summary()["mean_eigenvalue"].reshape(1)

    def _gather(self, tensors: list[Tensor]) -> Tensor:
        return self.layers[0].view.gather(tensors)


@final
class Stack(Bundle):
    """Layers with equal views and stackable blocks of one shape, along a new first dimension."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__(layers, Block.stacked([layer.block for layer in layers]))

    def scatter(self, joint: Tensor) -> list[Tensor]:
        """Scatter the view of all layers at once."""
        parts = zip(self.layers[0].view.scatter(joint), self.layers[0].params, strict=True)
        return [piece for part, p in parts for piece in laid_out_like(part, p).unbind()]

    def split(self, joint: Tensor) -> Sequence[Tensor]:
        """Return the slices."""
        return joint.unbind()

    def mean_eigenvalues(self) -> Tensor:
        """Return the blocks' mean eigenvalues, one for each slice."""
        return self.block.summary()["mean_eigenvalue"]

    def _gather(self, tensors: list[Tensor]) -> Tensor:
        count = len(self.layers)
        positions = [stacked(tensors[start : start + count]) for start in range(0, len(tensors), count)]
        return self.layers[0].view.gather(positions)


@final
class Chain(Bundle):
    """Layers of one parameter with diagonal blocks, concatenated to a vector."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._shapes = [layer.block.shape for layer in layers]
        self._sizes = [prod(shape) for shape in self._shapes]
        super().__init__(layers, DiagonalBlock.concatenated([layer.block for layer in layers]))

    def scatter(self, joint: Tensor) -> list[Tensor]:
        """Split the vector."""
        return [laid_out_like(piece, p) for piece, p in zip(self.split(joint), self.params, strict=True)]

    def split(self, joint: Tensor) -> Sequence[Tensor]:
        """Split the vector."""
        pieces = zip(joint.split(self._sizes), self._shapes, strict=True)
        return [piece if len(shape) == 1 else piece.view(shape) for piece, shape in pieces]

    def mean_eigenvalues(self) -> Tensor:
        """Return the mean of s squared over each piece."""
        norms = foreach_norm(list(self.block.factors["s"].split(self._sizes)))
        return torch.stack(foreach_div(norms, [size**0.5 for size in self._sizes])).square()

    def _gather(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


def bundle_layers(layers: Iterable[Layer]) -> list[Bundle]:
    """Join similar layers, and leave the others single; each layer is in one bundle.

    Args:
        layers: The plan. The factors of its blocks move in memory; they keep their values and stay the same objects.
    """
    alike: dict[tuple, list[Layer]] = {}
    for layer in layers:
        alike.setdefault(_kind(layer), []).append(layer)
    bundles: list[Bundle] = []
    for members in alike.values():
        # No bundle of several layers may have more than _LARGEST elements.
        chunks, size = [[members[0]]], prod(members[0].block.shape)
        for layer in members[1:]:
            size += prod(layer.block.shape)
            if size > _LARGEST:
                chunks.append([])
                size = prod(layer.block.shape)
            chunks[-1].append(layer)
        joint = Chain if isinstance(members[0].block, DiagonalBlock) else Stack
        bundles += [joint(chunk) if len(chunk) > 1 else Single(chunk[0]) for chunk in chunks]
    return bundles


def _kind(layer: Layer) -> tuple:
    """Return what layers must have in common to be joined."""
    block, factor = layer.block, next(iter(layer.block.factors.values()))
    place = (type(block), factor.dtype, factor.device, block.matmul)
    # An empty tensor has no address, and stacking meta tensors would allocate memory for nothing.
    if prod(block.shape) == 0 or factor.is_meta:
        return (layer.name,)
    if isinstance(block, DiagonalBlock) and len(layer.params) == 1:
        return place
    if block.stackable:
        return (*place, block.shape, tuple(block.tensors), layer.view.key, *(p.dtype for p in layer.params))
    return (layer.name,)
