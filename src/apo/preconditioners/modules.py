"""Which Kronecker-structured block each kind of module gets.

- Linear and Bilinear: ``[out, in + 1]``, the bias as one more column.
- Convolutions, also transposed: ``[out, in/groups * kernel + 1]``; or, factored, ``[out, kernel, in/groups]``
  and the bias by itself (a kernel of size one has nothing to factor and stays a matrix).
- Embeddings: ``[vocabulary, embedding]`` with no factor on the vocabulary's side.
- Attention's packed query, key and value projections: three matrices ``[embed, embed + 1]``.
- Recurrent layers: one matrix ``[hidden, in + 1]`` per gate.
- Normalisation layers, and everything with at most one dimension longer than one: diagonal.
- Anything else: ``[first, product of the others]``, dimensions of length one left out.

A side longer than ``max_dim`` loses its dense factor. A module that the user derived from one of these is
treated like it; a parameter that such a module adds is treated by its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from apo.preconditioners.block import Block
from apo.preconditioners.diagonal_block import DiagonalBlock
from apo.preconditioners.factored_conv_block import FactoredConvBlock
from apo.preconditioners.kronecker_block import KroneckerBlock
from apo.preconditioners.views import ChannelsLastView, MatrixView, ReshapeView, TransposedConvView, View

__all__ = ["Limits", "kronecker_pieces"]

Own = Mapping[str, Tensor]
Piece = tuple[tuple[str, ...], View, Block]


@dataclass(frozen=True)
class Limits:
    """What the user chose about the size of factors.

    Attributes:
        conv: ``"matrix"`` or ``"factored"``.
        max_dim: The longest side that gets a dense factor.

    Example:
        >>> Limits("matrix", 0)
        Traceback (most recent call last):
            ...
        ValueError: max_dim is 0: pass a positive integer.
    """

    conv: str
    max_dim: int

    def __post_init__(self) -> None:
        if self.conv not in ("matrix", "factored"):
            raise ValueError(f"conv is {self.conv!r}: pass 'matrix' or 'factored'.")
        if not isinstance(self.max_dim, int) or self.max_dim < 1:
            raise ValueError(f"max_dim is {self.max_dim!r}: pass a positive integer.")

    def dense(self, *sides: int) -> list[bool]:
        """Tell for each side whether it gets a dense factor."""
        return [side <= self.max_dim for side in sides]


def kronecker_pieces(module: nn.Module | None, own: Own, limits: Limits) -> Iterator[Piece]:
    """Yield names, view and block for groups of a module's own parameters, each parameter once.

    Args:
        module: The module, or ``None`` for parameters without one.
        own: Those of its own parameters that are to be planned, by name.
        limits: The user's choices.

    Example:
        >>> module = nn.MultiheadAttention(4, 2)
        >>> own = dict(module.named_parameters(recurse=False))
        >>> [(names, view.shape) for names, view, _ in kronecker_pieces(module, own, Limits("matrix", 8192))]
        [(('in_proj_weight', 'in_proj_bias'), (3, 4, 5))]
    """
    rest = dict(own)
    for kinds, specialist in _SPECIALISTS:
        if isinstance(module, kinds):
            for piece in specialist(module, own, limits):
                yield piece
                for name in piece[0]:
                    del rest[name]
            break
    for name, parameter in rest.items():
        yield _by_shape(name, parameter, limits)


def _by_shape(name: str, parameter: Tensor, limits: Limits) -> Piece:
    sides = [side for side in parameter.shape if side != 1]
    if len(sides) < 2:
        return _diagonal(name, parameter)
    rows, cols = sides[0], prod(sides[1:])
    block = KroneckerBlock(rows, cols, *limits.dense(rows, cols), **_placement(parameter))
    return (name,), ReshapeView(parameter.shape, (rows, cols)), block


def _diagonal(name: str, parameter: Tensor) -> Piece:
    return (name,), ReshapeView(parameter.shape), DiagonalBlock(parameter.shape, **_placement(parameter))


def _matrix(weight: str, bias: str, own: Own, limits: Limits, stack: int | None = None) -> Piece:
    """Plan a weight as a matrix, with the bias as a column where there is one per row."""
    tensor = own[weight]
    with_bias = bias in own and own[bias].shape == tensor.shape[:1]
    view = MatrixView(tensor.shape, bias=with_bias, stack=stack)
    return (weight, bias) if with_bias else (weight,), view, _matrix_block(view, tensor, limits)


def _matrix_block(view: View, like: Tensor, limits: Limits) -> KroneckerBlock:
    rows, cols = view.shape[-2:]
    stack = view.shape[0] if len(view.shape) == 3 else None
    return KroneckerBlock(rows, cols, *limits.dense(rows, cols), stack=stack, **_placement(like))


def _linear(module: nn.Module, own: Own, limits: Limits) -> list[Piece]:
    return [_matrix("weight", "bias", own, limits)] if "weight" in own else []


def _convolution(module: nn.Module, own: Own, limits: Limits) -> list[Piece]:
    if "weight" not in own:
        return []
    weight = own["weight"]
    if limits.conv == "matrix" or prod(weight.shape[2:]) == 1:
        return [_matrix("weight", "bias", own, limits)]
    view, block = _factored(weight.shape, weight, limits)
    return [(("weight",), view, block)]


def _transposed_convolution(module: nn.Module, own: Own, limits: Limits) -> list[Piece]:
    if "weight" not in own:
        return []
    weight, groups = own["weight"], getattr(module, "groups", 1)
    turned = (weight.shape[1] * groups, weight.shape[0] // groups, *weight.shape[2:])
    if limits.conv == "matrix" or prod(weight.shape[2:]) == 1:
        names = ("weight", "bias") if "bias" in own else ("weight",)
        inner = MatrixView(turned, bias="bias" in own)
        block = _matrix_block(inner, weight, limits)
    else:
        names = ("weight",)
        inner, block = _factored(turned, weight, limits)
    return [(names, TransposedConvView(weight.shape, groups, inner), block)]


def _factored(shape: tuple[int, ...], like: Tensor, limits: Limits) -> tuple[View, Block]:
    sides = (shape[0], shape[1], prod(shape[2:]))
    return ChannelsLastView(shape), FactoredConvBlock(*sides, *limits.dense(*sides), **_placement(like))


def _embedding(module: nn.Module, own: Own, limits: Limits) -> list[Piece]:
    if "weight" not in own:
        return []
    weight = own["weight"]
    rows, cols = weight.shape
    # Most rows have no gradient in a batch: mixing rows would move words that did not occur.
    block = KroneckerBlock(rows, cols, False, *limits.dense(cols), **_placement(weight))
    return [(("weight",), ReshapeView(weight.shape), block)]


def _normalisation(module: nn.Module, own: Own, limits: Limits) -> list[Piece]:
    return [_diagonal(name, parameter) for name, parameter in own.items()]


def _attention(module: nn.Module, own: Own, limits: Limits) -> list[Piece]:
    if "in_proj_weight" not in own:  # keys or values of another size: three weights, each treated by its shape
        return []
    return [_matrix("in_proj_weight", "in_proj_bias", own, limits, stack=3)]


def _recurrent(module: nn.Module, own: Own, limits: Limits) -> list[Piece]:
    hidden: int = getattr(module, "hidden_size")  # noqa: B009 - both base classes have it, nn.Module does not
    return [
        _matrix(name, name.replace("weight", "bias"), own, limits, stack=parameter.shape[0] // hidden)
        for name, parameter in own.items()
        if name.startswith(("weight_ih", "weight_hh"))
    ]


def _placement(like: Tensor) -> dict:
    return {"dtype": like.dtype, "device": like.device}


_Specialist = Callable[[nn.Module, Own, Limits], list[Piece]]
_SPECIALISTS: list[tuple[tuple[type[nn.Module], ...], _Specialist]] = [
    ((nn.Linear, nn.Bilinear), _linear),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed_convolution),
    ((nn.Embedding, nn.EmbeddingBag), _embedding),
    ((nn.LayerNorm, nn.RMSNorm), _normalisation),
    ((nn.MultiheadAttention,), _attention),
    ((nn.RNNBase, nn.RNNCellBase), _recurrent),
]
