"""The product P g for similar layers together: few launches, even in a network of many layers.

A network has many layers of few shapes. The products for one layer are small for an accelerator, so launches take most
of the time. Blocks of one shape are therefore *stacked*: their factors become slices of one tensor ``[layers, n, n]``,
their gradients are stacked too, and one batched product computes all of them. Diagonal blocks act elementwise, so they
are *chained*: concatenated to one long vector whatever their shapes.

The factors of each layer's block stay the same tensor objects; only their memory moves, into the joint tensor. A
meta-optimizer that holds a factor still reads and writes the right numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from apo.preconditioners.block import Block
from apo.preconditioners.plan import Layer
from apo.preconditioners.simple_blocks import DiagonalBlock
from apo.preconditioners.views import ConcatenatedView
from apo.torch_internals import foreach_add, foreach_div, foreach_mul, foreach_norm

__all__ = ["Bundle", "Bundled", "Groups", "Kept", "Rates", "bundle_layers", "initial_steps"]

Groups = Sequence[Mapping[str, Any]]
Rates = dict[Tensor, float]

# The most elements in the gradients of a bundle. Larger products are efficient on their own, and joining more layers
# would only cost memory for intermediate results.
_LARGEST = 2**24


class Kept(NamedTuple):
    """What a pull-back needs: the gradients that were multiplied, by bundle or layer, and the rates on the products."""

    gradients: dict[Any, Tensor]
    rates: Rates


@final
class Bundled:
    """P g and its pull-back, with the gradients of each bundle multiplied by its joint block.

    ``LayerByLayer`` and ``Replayed`` have the same methods with the same results; the optimizer chooses the
    fastest that applies.

    Args:
        layers: The plan, on one process. The factors of its blocks move in memory.

    Example:
        >>> from apo.preconditioners import plan_layers
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> gradients = {p: torch.ones_like(p) for p in model.parameters()}
        >>> group = {"params": list(model.parameters()), "initial_step": 0.1, "weight_decay": 0.0}
        >>> Bundled(plan_layers(model)).multiply([group], gradients)[0][model[1].bias]
        tensor([0.1000, 0.1000])
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._bundles = bundle_layers(layers)

    def multiply(
        self, groups: Groups, gradients: Mapping[Tensor, Tensor], look_ahead: bool = False
    ) -> tuple[dict[Tensor, Tensor], Kept]:
        """Return P g, or -P g to look ahead, and what :meth:`pull_back` then needs.

        Args:
            groups: The optimizer's param groups.
            gradients: The dense gradient of every parameter that has one, to which coupled weight decay is added here.
            look_ahead: Whether a pull-back will follow.
        """
        before, rates = initial_steps(self._layers, groups, look_ahead)
        gradients = _scaled(_decayed(groups, gradients), before)
        kept: dict[Any, Tensor] = {}
        found: dict[Tensor, Tensor] = {}
        for bundle in self._current_bundles():
            joint = bundle.gather(gradients)
            if joint is None:
                continue
            if look_ahead:
                # The gathered tensor of a single layer may share memory with .grad, which the next backward overwrites.
                kept[bundle] = joint = joint.clone() if len(bundle.layers) == 1 else joint
            found |= zip(bundle.params, bundle.scatter(bundle.block.apply(joint)), strict=True)
        # Only parameters with a gradient move, but a bundle's product has values for the others too.
        return _scaled({p: found[p] for p in gradients}, rates), Kept(kept, rates)

    def pull_back(self, kept: Kept, cotangents: Mapping[Tensor, Tensor]) -> dict[str, dict[str, Tensor]]:
        r"""Return the gradient of :math:`\sum_i \langle h_i, \Delta_i \rangle`, by layer and factor.

        Args:
            kept: What :meth:`multiply` returned beside the displacements :math:`\Delta_i`.
            cotangents: :math:`h_i` for each of them. Layers without gradients may be left out of the result.
        """
        scaled = _scaled(cotangents, kept.rates)
        found: dict[str, dict[str, Tensor]] = {}
        for bundle, gradient in kept.gradients.items():
            joint = bundle.gather(scaled)
            assert joint is not None
            found |= {layer.name: {} for layer in bundle.layers}
            for key, value in bundle.block.pull_back(gradient, joint).items():
                for layer, part in zip(bundle.layers, bundle.split(value), strict=True):
                    found[layer.name][key] = part
        return found

    def observe(self, groups: Groups, gradients: Mapping[Tensor, Tensor], sampled: bool = False) -> None:
        """Take gradients into the statistics of the blocks; those at sampled targets without coupled weight decay."""
        gradients = gradients if sampled else _decayed(groups, gradients)
        gradients = _scaled(gradients, initial_steps(self._layers, groups)[0])
        for bundle in self._current_bundles():
            joint = bundle.gather(gradients)
            if joint is not None:
                bundle.block.observe(joint, sampled)

    def mean_eigenvalues(self) -> dict[str, Tensor]:
        """Return the mean eigenvalue of each layer's block, as 0-dimensional tensors in the order of the plan."""
        found = {}
        for bundle in self._current_bundles():
            found |= zip([layer.name for layer in bundle.layers], bundle.mean_eigenvalues().unbind(), strict=True)
        return {layer.name: found[layer.name] for layer in self._layers}

    def _current_bundles(self) -> list[Bundle]:
        """Return the bundles; if the user has replaced a factor, the layers of its bundle separately."""
        current: list[Bundle] = []
        for bundle in self._bundles:
            current += [bundle] if bundle.is_current() else [Bundle([layer]) for layer in bundle.layers]
        return current


def initial_steps(layers: Sequence[Layer], groups: Groups, look_ahead: bool = False) -> tuple[Rates, Rates]:
    r"""Return the factors on the gradient (ones are left out) and on the product, by parameter.

    Parameters of one layer may be in groups with different step sizes. P is then :math:`D^{1/2} \hat P D^{1/2}`, which
    stays symmetric. With one step size for the whole layer, only the product is multiplied; to look ahead, by minus it.
    """
    after = {p: float(group["initial_step"]) for group in groups for p in group["params"]}
    before: Rates = {}
    if len(set(after.values())) > 1:
        for layer in layers:
            if len({after[p] for p in layer.params}) > 1:
                roots = {p: after[p] ** 0.5 for p in layer.params}
                before |= roots
                after |= roots
    return before, {p: -rate for p, rate in after.items()} if look_ahead else after


def _decayed(groups: Groups, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Add coupled weight decay to gradients."""
    found = dict(gradients)
    for group in groups:
        params = [p for p in group["params"] if p in gradients]
        if params and group["weight_decay"] and not group["decoupled_weight_decay"]:
            alike = [laid_out_like(gradients[p], p) for p in params]
            found |= zip(params, foreach_add(alike, params, alpha=group["weight_decay"]), strict=True)
    return found


def _scaled(tensors: Mapping[Tensor, Tensor], rates: Rates) -> dict[Tensor, Tensor]:
    """Multiply each tensor by its rate; one without a rate, or with rate 1, is not copied."""
    chosen = [p for p in tensors if rates.get(p, 1.0) != 1.0]
    if not chosen:
        return dict(tensors)
    scaled = foreach_mul([tensors[p] for p in chosen], [rates[p] for p in chosen])
    return {**tensors, **dict(zip(chosen, scaled, strict=True))}


@final
class Bundle:
    """A layer and its block; or similar layers, and one block that acts on the gradients of all of them.

    Args:
        layers: The layers. Those of more than one have diagonal blocks, which are chained, or stackable ones of one
            shape and equal views, which are stacked. The factors of their blocks move into the memory of the joint one.

    Attributes:
        block: The joint block.
        params: The parameters of the layers, in the order of :meth:`scatter`.

    Example:
        >>> from apo.preconditioners import plan_layers
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
        >>> [(len(bundle.layers), bundle.block.shape) for bundle in bundle_layers(plan_layers(model))]
        [(2, (2, 3, 4)), (2, (6,))]
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = list(layers)
        self.params = [p for position in zip(*(layer.params for layer in layers), strict=True) for p in position]
        blocks = [layer.block for layer in layers]
        self._chained = len(blocks) > 1 and isinstance(blocks[0], DiagonalBlock)
        self._stacked = len(blocks) > 1 and not self._chained
        self._memory: list[tuple[Block, dict[str, int]]] = []
        self.block, self._view = blocks[0], layers[0].view
        if len(blocks) == 1:
            return
        if self._chained:
            self.block = DiagonalBlock.concatenated(blocks)
            self._view = ConcatenatedView([p.shape for p in self.params])
        else:
            self.block = Block.stacked(blocks)
        parts = {key: self.split(joint) for key, joint in self.block.tensors.items()}
        for index, block in enumerate(blocks):
            memory = {key: slices[index] for key, slices in parts.items()}
            block.move_factors(memory)
            # Addresses are enough to notice a replaced factor, since the joint block keeps its memory alive.
            self._memory.append((block, {key: part.data_ptr() for key, part in memory.items()}))

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
        found = [tensors.get(p) for p in self.params]
        if all(tensor is None for tensor in found):
            return None
        if self._stacked:
            count = len(self.layers)
            whole = [torch.zeros_like(p) if t is None else t for p, t in zip(self.params, found, strict=True)]
            found = [stacked(whole[start : start + count]) for start in range(0, len(whole), count)]
        return self._view.gather(found)

    def scatter(self, joint: Tensor) -> list[Tensor]:
        """Split a joint tensor: one tensor for each of ``self.params``, with its strides."""
        patterns = self.params[:: len(self.layers)] if self._stacked else self.params
        parts = [laid_out_like(part, p) for part, p in zip(self._view.scatter(joint), patterns, strict=True)]
        return [piece for part in parts for piece in part.unbind()] if self._stacked else parts

    def split(self, joint: Tensor) -> Sequence[Tensor]:
        """Split a tensor shaped like a factor of the joint block: one tensor for each layer."""
        if self._stacked:
            return joint.unbind()
        if not self._chained:
            return [joint]
        shapes = [layer.block.shape for layer in self.layers]
        return [part.view(shape) for part, shape in zip(joint.split([*map(prod, shapes)]), shapes, strict=True)]

    def mean_eigenvalues(self) -> Tensor:
        """Return the mean eigenvalue of the block of each layer, ``[layers]``."""
        if not self._chained:
            return self.block.summary()["mean_eigenvalue"].reshape(-1)
        parts = self.split(self.block.factors["s"])
        return torch.stack(foreach_div(foreach_norm(parts), [part.numel() ** 0.5 for part in parts])).square()


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
        together: list[Layer] = []
        size = 0  # no bundle of several layers may have more than _LARGEST elements
        for layer in members:
            size += prod(layer.block.shape)
            if together and size > _LARGEST:
                bundles.append(Bundle(together))
                together, size = [], prod(layer.block.shape)
            together.append(layer)
        bundles.append(Bundle(together))
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


# --- strides: how the numbers of a tensor are laid out in memory ---
#
# torch's foreach operations take one launch for a whole list of tensors, but only if paired tensors have the same
# strides; a single pair with different strides costs one launch per tensor. Directions therefore get the strides of
# their parameters.


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape like ``torch.stack``, but in one launch for any order of dimensions.

    Example:
        >>> image = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        >>> stacked([image, image]).shape
        torch.Size([2, 2, 3, 4, 4])
    """
    order = _memory_order(tensors[0].shape, tensors[0].stride())
    if order is None or order == tuple(range(len(order))):
        return torch.stack(list(tensors))
    together = torch.stack([tensor.permute(order) for tensor in tensors])
    return together.permute(0, *[1 + order.index(dim) for dim in range(len(order))])


def laid_out_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """Return a tensor whose last dimensions have the strides of ``pattern``; a copy only if needed.

    Args:
        tensor: Of the shape of ``pattern``, or with additional leading dimensions.
        pattern: The tensor with the strides to copy. If it has gaps or overlaps, the result is contiguous.

    Example:
        >>> image = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        >>> laid_out_like(torch.zeros(5, 2, 3, 4, 4), image)[0].stride() == image.stride()
        True
    """
    lead, stride = tensor.ndim - pattern.ndim, pattern.stride()
    if tensor.stride()[lead:] == stride:
        return tensor
    order = _memory_order(pattern.shape, stride)
    if order is None:
        return tensor.contiguous()
    inner = tensor.permute(*range(lead), *[lead + dim for dim in order]).contiguous()
    return inner.as_strided(tensor.shape, (*inner.stride()[:lead], *stride), inner.storage_offset())


@lru_cache(maxsize=4096)
def _memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the dimensions from the largest stride to the smallest; None if memory has gaps or overlaps."""
    # A dimension of length one may have any stride; sorted last, it does no harm.
    order = sorted(range(len(shape)), key=lambda dim: -stride[dim] if shape[dim] > 1 else 0)
    expected = 1
    for dim in reversed(order):
        if shape[dim] > 1 and stride[dim] != expected:
            return None
        expected *= shape[dim]
    return tuple(order)
