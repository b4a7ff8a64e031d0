"""Vectors as lists of tensors: the few operations that the engine and the rules need.

A point in weight space is a list of tensors, one per parameter, in a fixed order. Results of reductions are
0-dimensional tensors on the device of the data, so that nothing here waits for an accelerator. Tensors of 16 bits
are widened to float32 before they are reduced or subtracted. The ``foreach`` operations are those that torch's own
optimizers are made of. A part may be a DTensor: it is moved shard by shard and reduced over all shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apo.distributed import is_sharded, summed_over_shards

__all__ = ["advance_", "assign_", "copies", "differences", "dot", "norm", "scaled", "wide"]

Vector = Sequence[Tensor]


def wide(tensor: Tensor) -> Tensor:
    """Widen a 16-bit tensor to float32; leave others alone."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@torch.no_grad()
def assign_(target: Vector, source: Vector) -> None:
    """Write ``source`` into ``target`` in place."""
    if target:
        torch._foreach_copy_(_local(target), _local(source))  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def copies(vector: Vector) -> list[Tensor]:
    """Return a vector of its own memory with the same values."""
    result = [torch.empty_like(tensor, requires_grad=False) for tensor in vector]
    assign_(result, vector)
    return result


@torch.no_grad()
def scaled(vector: Vector, factor: float | Sequence[float]) -> list[Tensor]:
    """Return a number times the vector, or one number for each part times that part."""
    return list(torch._foreach_mul(list(vector), factor)) if vector else []  # type: ignore[call-overload]  # pyright: ignore


@torch.no_grad()
def advance_(target: Vector, direction: Vector, rate: float) -> None:
    """Add ``rate * direction`` to ``target`` in place, rounding once."""
    if target:
        torch._foreach_add_(_local(target), _local(direction), alpha=rate)  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def differences(left: Vector, right: Vector) -> list[Tensor]:
    """Return ``left - right``, in float32 at least."""
    if not left:
        return []
    return list(torch._foreach_sub([wide(tensor) for tensor in left], [wide(tensor) for tensor in right]))  # pyright: ignore[reportPrivateImportUsage]


def dot(left: Vector, right: Vector) -> Tensor:
    """Return the inner product of two vectors as a 0-dimensional tensor."""
    if not left:
        return torch.zeros(())
    pairs = [_flat(one, other) for one, other in zip(_local(left), _local(right), strict=True)]
    if pairs[0][0].is_cuda and not _any_sharded(left):
        # Two copies cost less than a kernel for each part: there are hundreds of parts, most of them tiny.
        return torch.dot(torch.cat([one for one, _ in pairs]), torch.cat([other for _, other in pairs]))
    values = torch.stack([torch.dot(one, other) for one, other in pairs])
    return (summed_over_shards(values, list(left)) if _any_sharded(left) else values).sum()


def norm(tensors: Vector) -> Tensor:
    """Return the Euclidean norm of a vector as a 0-dimensional tensor."""
    if not tensors:
        return torch.zeros(())
    if _any_sharded(tensors):
        return dot(tensors, tensors).sqrt()
    return torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm([wide(t) for t in tensors]))))  # pyright: ignore[reportPrivateImportUsage]


def _flat(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements of both in the same order; where that is how they lie in memory, without a copy."""
    one, other = wide(one), wide(other)
    if one.is_complex():  # the inner product of real and imaginary parts, as gradients of complex parameters have it
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if not one.is_contiguous() and one.stride() == other.stride():  # channels last
        order = sorted(range(one.ndim), key=one.stride, reverse=True)
        one, other = one.permute(order), other.permute(order)
    return one.reshape(-1), other.reshape(-1)


def _any_sharded(tensors: Vector) -> bool:
    return any(is_sharded(tensor) for tensor in tensors)


def _local(tensors: Vector) -> list[Tensor]:
    """Return the memory that this process holds of each tensor, to be read or written in place."""
    return [tensor.detach().to_local() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]
