"""Vectors as lists of tensors: the few operations that the meta-step and the rules need.

A point in weight space is a list of tensors, one per parameter, in a fixed order. Results of reductions are
0-dimensional tensors on the device of the data, so that nothing here waits for an accelerator. Tensors of 16 bits
are widened to float32 before they are reduced or subtracted. A part may be a DTensor: it is moved shard by shard and
reduced over all shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from apo.distributed import is_sharded, summed_over_shards
from apo.torch_internals import foreach_add_, foreach_copy_, foreach_mul, foreach_norm, foreach_sub

__all__ = [
    "advance_",
    "assign_",
    "copies",
    "differences",
    "dot",
    "local_parts",
    "norm",
    "scaled",
    "wide",
    "widened",
    "zero_share",
]

Vector = Sequence[Tensor]

_HALF = (torch.float16, torch.bfloat16)
_PLAIN = {Tensor, nn.Parameter}


def wide(tensor: Tensor) -> Tensor:
    """Widen a 16-bit tensor to float32; return others as they are."""
    return tensor.float() if tensor.dtype in _HALF else tensor


def widened(vector: Vector) -> list[Tensor]:
    """Widen the 16-bit parts of a vector to float32."""
    return [part.float() if part.dtype in _HALF else part for part in vector]


# In what follows `torch.set_grad_enabled(False)` is `torch.no_grad()` in half the time: a meta-step asks a dozen times.


def assign_(target: Vector, source: Vector) -> None:
    """Write ``source`` into ``target`` in place."""
    if target:
        with torch.set_grad_enabled(False):
            foreach_copy_(local_parts(target), local_parts(source))


def copies(vector: Vector) -> list[Tensor]:
    """Return a copy of the vector."""
    result = [torch.empty_like(tensor, requires_grad=False) for tensor in vector]
    assign_(result, vector)
    return result


def scaled(vector: Vector, factor: float | Tensor | Sequence[float]) -> list[Tensor]:
    """Return a number times the vector, or one number for each part times that part."""
    with torch.set_grad_enabled(False):
        return list(foreach_mul(list(vector), factor)) if vector else []


def advance_(target: Vector, direction: Vector, rate: float) -> None:
    """Add ``rate * direction`` to ``target`` in place, rounding once."""
    if target:
        with torch.set_grad_enabled(False):
            foreach_add_(local_parts(target), local_parts(direction), alpha=rate)


def differences(left: Vector, right: Vector) -> list[Tensor]:
    """Return ``left - right``, in float32 at least."""
    with torch.set_grad_enabled(False):
        return list(foreach_sub(widened(left), widened(right))) if left else []


def dot(left: Vector, right: Vector) -> Tensor:
    """Return the inner product of two vectors as a 0-dimensional tensor."""
    if not left:
        return torch.zeros(())
    sharded = _any_sharded(left)
    ones, others = [], []
    for one, other in zip(local_parts(left), local_parts(right), strict=True):
        if one.dtype in _HALF or other.dtype in _HALF:
            one, other = wide(one), wide(other)
        if one.is_complex():  # the inner product of real and imaginary parts, as torch's gradients have it
            one, other = torch.view_as_real(one), torch.view_as_real(other)
        if not one.is_contiguous() and one.stride() == other.stride():  # channels last: flat without a copy
            order = sorted(range(one.ndim), key=one.stride, reverse=True)
            one, other = one.permute(order), other.permute(order)
        if one.ndim != 1:
            one, other = one.ravel(), other.ravel()
        ones.append(one)
        others.append(other)
    if ones[0].is_cuda and not sharded:
        # Two copies cost less than a kernel for each part: there are hundreds of parts, most of them tiny.
        return torch.dot(torch.cat(ones), torch.cat(others))
    values = torch.stack([torch.dot(one, other) for one, other in zip(ones, others, strict=True)])
    return (summed_over_shards(values, list(left)) if sharded else values).sum()


def norm(vector: Vector) -> Tensor:
    """Return the Euclidean norm of a vector as a 0-dimensional tensor."""
    if not vector:
        return torch.zeros(())
    if _any_sharded(vector):
        return dot(vector, vector).sqrt()
    norms = foreach_norm(widened(vector))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def zero_share(vector: Vector) -> Tensor:
    """Return the share of the parts that are exactly zero; of a sharded part, that of this process is looked at."""
    parts = local_parts(vector)
    # Squares of tiny numbers vanish, so the sum of magnitudes decides. On the CPU it takes five times as long as the
    # Euclidean norm, which is enough if there is no zero at all.
    if parts[0].is_cpu and all(foreach_norm(parts)):
        return torch.zeros(())
    return (torch.stack(foreach_norm(parts, 1)) == 0).float().mean()


def _any_sharded(vector: Vector) -> bool:
    """Return whether a part is a DTensor; plain tensors, which are nearly all, are known by their type at once."""
    return not _PLAIN.issuperset(map(type, vector)) and any(map(is_sharded, vector))


def local_parts(vector: Vector) -> Vector:
    """Return the memory that this process holds of each part, to be read or written in place."""
    if _PLAIN.issuperset(map(type, vector)):  # as nearly always
        return vector
    return [tensor.detach().to_local() if is_sharded(tensor) else tensor for tensor in vector]  # type: ignore[attr-defined]
