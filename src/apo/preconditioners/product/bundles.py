"""Layers whose blocks are computed together.

A network has many layers of few shapes, and a product with the factors of one is small for an accelerator: the time
goes into starting operations. Blocks of one shape are therefore *stacked*: their factors become slices of one tensor
``[layers, n, n]``, their gradients are stacked as well, and one batched product serves all. Diagonal blocks act on each
number by itself, so those of any shapes are strung together to one long vector.

The factors of a layer's own block stay the tensors they are: only their memory moves, into the joint tensor. So whoever
holds a factor (a meta-optimizer, a checkpoint) sees and changes the same numbers as before.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import final

import torch
from torch import Tensor

from apo.preconditioners.block import Block
from apo.preconditioners.diagonal_block import DiagonalBlock
from apo.preconditioners.plan import Layer
from apo.preconditioners.product.layout import laid_out_like, stacked

__all__ = ["Bundle", "Chain", "Single", "Stack", "bundle_layers"]

# The most numbers in the gradients of a bundle. Beyond it a product is large enough by itself, and joining more layers
# would only cost memory for what lies between the products.
_LARGEST = 2**24


class Bundle(ABC):
    """Layers, and one block that acts on the gradients of all of them.

    Args:
        layers: The layers.
        block: The joint block, whose factors share memory with those of the layers' own blocks.

    Attributes:
        layers: The layers.
        block: The joint block.
        params: Their parameters, in the order of :meth:`scatter`.

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

    def gather(self, tensors: Mapping[Tensor, Tensor]) -> Tensor | None:
        """Join the tensors of the parameters, as the joint block takes them; those that are missing count as zeros.

        Returns:
            The joint tensor, or None if all are missing. It may share memory with its sources.
        """
        present = [tensors.get(p) for p in self.params]
        if all(tensor is None for tensor in present):
            return None
        return self._gather(
            [torch.zeros_like(p) if t is None else t for t, p in zip(present, self.params, strict=True)]
        )

    @abstractmethod
    def scatter(self, joint: Tensor) -> list[Tensor]:
        """Take a joint tensor apart: one tensor for each of ``self.params``, laid out in memory as it is."""

    @abstractmethod
    def split(self, key: str, joint: Tensor) -> Sequence[Tensor]:
        """Take apart what belongs to one factor of the joint block: one tensor for each layer."""

    @abstractmethod
    def mean_eigenvalues(self) -> Tensor:
        """Return the mean eigenvalue of the block of each layer, ``[layers]``."""

    def holds(self) -> bool:
        """Tell whether the joint factors still are those of the layers: someone may have exchanged the latter."""
        for key, parts in self._parts.items():
            for layer, part in zip(self.layers, parts, strict=True):
                factor = layer.block.factors.get(key)
                if factor is None or factor.data_ptr() != part.data_ptr():
                    return False
        return True

    @abstractmethod
    def _gather(self, tensors: list[Tensor]) -> Tensor: ...

    def _adopt(self) -> None:
        """Let the factors of the layers' own blocks lie in the joint ones."""
        self._parts = {key: list(self.split(key, joint)) for key, joint in self.block.factors.items()}
        for key, parts in self._parts.items():
            for layer, part in zip(self.layers, parts, strict=True):
                layer.block.factors[key].data = part

    _parts: dict[str, list[Tensor]]


@final
class Single(Bundle):
    """One layer by itself; its block is the joint one.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__([layer], layer.block)

    def scatter(self, joint: Tensor) -> list[Tensor]:
        """Take the layer's view apart."""
        (layer,) = self.layers
        return [laid_out_like(part, p) for part, p in zip(layer.view.scatter(joint), layer.params, strict=True)]

    def split(self, key: str, joint: Tensor) -> Sequence[Tensor]:
        """Return the only part."""
        return [joint]

    def mean_eigenvalues(self) -> Tensor:
        """Return the block's mean eigenvalue, ``[1]``."""
        return self.block.summary()["mean_eigenvalue"].reshape(1)

    def holds(self) -> bool:
        """There is nothing joint that could part."""
        return True

    def _gather(self, tensors: list[Tensor]) -> Tensor:
        return self.layers[0].view.gather(tensors)


@final
class Stack(Bundle):
    """Layers with equal views and stackable blocks of one shape, along a new first dimension.

    Args:
        layers: The layers.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        joint = copy.copy(layers[0].block)
        joint.shape, joint.lead = (len(layers), *joint.shape), 1
        joint.factors = {key: torch.stack([layer.block.factors[key] for layer in layers]) for key in joint.factors}
        super().__init__(layers, joint)
        self._adopt()

    def scatter(self, joint: Tensor) -> list[Tensor]:
        """Take the view of all layers apart at once."""
        parts = self.layers[0].view.scatter(joint)
        patterns = self.layers[0].params
        return [slice for part, p in zip(parts, patterns, strict=True) for slice in laid_out_like(part, p).unbind()]

    def split(self, key: str, joint: Tensor) -> Sequence[Tensor]:
        """Return the slices."""
        return joint.unbind()

    def mean_eigenvalues(self) -> Tensor:
        """Return the blocks' mean eigenvalues, one for each slice."""
        return self.block.summary()["mean_eigenvalue"]

    def _gather(self, tensors: list[Tensor]) -> Tensor:
        count = len(self.layers)
        positions = [tensors[start : start + count] for start in range(0, len(tensors), count)]
        return self.layers[0].view.gather([stacked(position) for position in positions])


@final
class Chain(Bundle):
    """Layers of one parameter with diagonal blocks, one after the other in a vector.

    Args:
        layers: The layers.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._shapes = [layer.block.shape for layer in layers]
        self._sizes = [prod(shape) for shape in self._shapes]
        factor = torch.cat([layer.block.factors["s"].reshape(-1) for layer in layers])
        joint = DiagonalBlock(factor.shape, dtype=factor.dtype, device="meta")
        joint.factors["s"] = factor
        super().__init__(layers, joint)
        self._adopt()

    def scatter(self, joint: Tensor) -> list[Tensor]:
        """Cut the vector."""
        return [laid_out_like(piece, p) for piece, p in zip(self.split("s", joint), self.params, strict=True)]

    def split(self, key: str, joint: Tensor) -> Sequence[Tensor]:
        """Cut the vector."""
        pieces = joint.split(self._sizes)
        return [
            piece if len(shape) == 1 else piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)
        ]

    def mean_eigenvalues(self) -> Tensor:
        """Return the mean of s squared over each piece."""
        norms = torch._foreach_norm(list(self.block.factors["s"].split(self._sizes)))  # pyright: ignore[reportPrivateImportUsage]
        return torch.stack(torch._foreach_div(norms, [size**0.5 for size in self._sizes])).square()  # pyright: ignore[reportPrivateImportUsage]

    def _gather(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


def bundle_layers(layers: Iterable[Layer]) -> list[Bundle]:
    """Join as many layers as belong together, and leave the others by themselves.

    Args:
        layers: The plan. The factors of its blocks move in memory; they keep their values, and stay the same objects.

    Returns:
        Bundles that have each layer once.
    """
    waiting: dict[tuple, list[Layer]] = {}
    for layer in layers:
        waiting.setdefault(_kind(layer), []).append(layer)
    return [_bundle(chunk) for alike in waiting.values() for chunk in _chunks(alike)]


def _kind(layer: Layer) -> tuple:
    """Return what layers must have in common to be joined."""
    block, factor = layer.block, next(iter(layer.block.factors.values()))
    place = (type(block), factor.dtype, factor.device, block.matmul)
    if prod(block.shape) == 0 or factor.is_meta:
        return (layer.name,)
    if isinstance(block, DiagonalBlock) and len(layer.params) == 1:
        return place
    if block.stackable:
        return (*place, block.shape, tuple(block.factors), layer.view.key, *(p.dtype for p in layer.params))
    return (layer.name,)


def _chunks(alike: Sequence[Layer]) -> list[list[Layer]]:
    """Divide layers so that no part but a single layer is too large."""
    chunks: list[list[Layer]] = []
    size = 0
    for layer in alike:
        size += prod(layer.block.shape)
        if not chunks or size > _LARGEST:
            chunks.append([])
            size = prod(layer.block.shape)
        chunks[-1].append(layer)
    return chunks


def _bundle(layers: Sequence[Layer]) -> Bundle:
    if len(layers) == 1:
        return Single(layers[0])
    return Chain(layers) if isinstance(layers[0].block, DiagonalBlock) else Stack(layers)
