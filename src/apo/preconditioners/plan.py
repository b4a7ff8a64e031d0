"""From a model to blocks: every trainable parameter belongs to exactly one layer of the plan.

With the Kronecker structure, the block depends on the module that owns the parameter:

- Linear and Bilinear: ``[out, in + 1]``, the bias as one more column.
- Convolutions, transposed ones too: ``[out, in/groups * kernel + 1]``; or, factored, ``[out, kernel, in/groups]`` with
  a separate bias (a kernel of size one has nothing to factor and stays a matrix).
- Embeddings: ``[vocabulary, embedding]`` with no factor for the vocabulary.
- Attention's packed query, key and value projections: three matrices ``[embed, embed + 1]``.
- Recurrent layers: one matrix ``[hidden, in + 1]`` per gate.
- Normalisation layers, and everything with at most one dimension longer than one: diagonal.
- Anything else: ``[first, product of the others]``, without dimensions of length one.

A side longer than ``max_dim`` gets no dense factor. In the eigenbasis structure the same matrices get a basis for each
of their sides, and embeddings none, like everything that is diagonal. A subclass of one of these modules is treated the
same way; parameters that the subclass adds are treated by their shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from apo.preconditioners.block import Block, KroneckerBlock, check_matmul
from apo.preconditioners.eigenbasis_block import EigenbasisBlock
from apo.preconditioners.factored_conv_block import FactoredConvBlock
from apo.preconditioners.simple_blocks import DiagonalBlock, FullBlock
from apo.preconditioners.views import (
    ChannelsLastView,
    ConcatenatedView,
    MatrixView,
    ReshapeView,
    TransposedConvView,
    View,
)
from apo.torch_internals import without_compile_prefix

__all__ = ["EIGENBASIS_MEMORY", "Choices", "Layer", "diagonal_plan", "full_plan", "kronecker_plan", "plan_layers"]
__all__ += ["trainable_parameters"]

Model = nn.Module | Tensor | Iterable[Tensor]

#: The usual coefficient of running averages of an eigenbasis: they remember about a hundred steps.
EIGENBASIS_MEMORY = 0.99


class Layer(NamedTuple):
    """Parameters that share a block.

    Attributes:
        name: The name of the first parameter, such as ``"encoder.0.weight"``; unique in a plan.
        params: The parameters.
        view: How they are gathered into the tensor that the block takes.
        block: The preconditioner of that tensor.

    Example:
        >>> (layer,) = plan_layers(nn.Linear(3, 2))
        >>> layer.name, len(layer.params), layer.view.shape
        ('weight', 2, (2, 4))
    """

    name: str
    params: tuple[Tensor, ...]
    view: View
    block: Block


@dataclass(frozen=True)
class Choices:
    """The user's choices about the blocks."""

    conv: str = "matrix"  # or "factored": how convolutions are treated; "auto" factors those that are too wide
    max_dim: int = 8192  # the longest side that gets a dense factor; for Full the largest number of parameters
    matmul: str = "float32"  # precision of products with the factors
    memory: float | None = None  # coefficient of the running averages of an eigenbasis; None for other structures
    sampled: bool = False  # whether these average gradients at sampled targets

    def __post_init__(self) -> None:
        if self.conv not in ("matrix", "factored", "auto"):
            raise ValueError(f"conv must be 'matrix', 'factored' or 'auto', got {self.conv!r}")
        if not isinstance(self.max_dim, int) or self.max_dim < 1:
            raise ValueError(f"max_dim must be a positive integer, got {self.max_dim!r}")
        check_matmul(self.matmul)
        if self.memory is not None and not 0 <= self.memory < 1:
            raise ValueError(f"memory must be a number of at least 0 and below 1, got {self.memory}")

    def factors(self, convolution: Sequence[int]) -> bool:
        """Return whether the weight ``[out, in, *k]`` of a convolution is factored, rather than a matrix."""
        if self.conv == "auto":
            return prod(convolution[2:]) > 1 and prod(convolution[1:]) >= self.max_dim  # and a column for the bias
        return prod(convolution[2:]) > 1 and self.conv == "factored"

    def dense(self, *sides: int) -> list[bool]:
        """Return for each side whether it gets a dense factor."""
        return [side <= self.max_dim for side in sides]


def plan_layers(
    model: Model,
    structure: str = "kronecker",
    *,
    conv: str = "matrix",
    max_dim: int = 8192,
    params: Iterable[Tensor] | None = None,
) -> list[Layer]:
    """Give every parameter of a model a block.

    With ``structure="kronecker"`` the block depends on the module that owns the parameter, as listed in
    :mod:`apo.preconditioners.plan`. A parameter that several modules share is planned once, for the first of them.
    Parameters that do not require gradients are left out.

    Args:
        model: A module, or parameters that belong to no module.
        structure: ``"kronecker"``, ``"eigenbasis"``, ``"diagonal"``, or ``"full"`` (one block for all parameters
            together).
        conv: ``"matrix"``, ``"factored"`` or ``"auto"`` (factored where the matrix is too wide): how the first two
            treat convolutions.
        max_dim: The longest side that gets a dense factor; for ``"full"`` the largest number of parameters.
        params: If given, plan only these; those that are not in the model are treated by their shape.

    Returns:
        Layers in the order of the model's modules, then the parameters that belong to no module.

    Raises:
        ValueError: If an argument is out of range, there is nothing to plan, or the full structure is too large.
        TypeError: If a parameter is complex.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 10))
        >>> for layer in plan_layers(model, conv="factored"):
        ...     print(layer.name, type(layer.block).__name__, layer.block.shape)
        0.weight FactoredConvBlock (8, 9, 3)
        0.bias DiagonalBlock (8,)
        1.weight DiagonalBlock (8,)
        1.bias DiagonalBlock (8,)
        3.weight KroneckerBlock (10, 33)
    """
    choices = Choices(conv, max_dim)
    if structure == "kronecker":
        return kronecker_plan(model, params, choices)
    if structure == "eigenbasis":
        return kronecker_plan(model, params, replace(choices, memory=EIGENBASIS_MEMORY))
    if structure == "diagonal":
        return diagonal_plan(model, params)
    if structure == "full":
        return full_plan(model, params, choices)
    raise ValueError(f"structure must be 'kronecker', 'eigenbasis', 'diagonal' or 'full', got {structure!r}")


def kronecker_plan(model: Model, params: Iterable[Tensor] | None, choices: Choices) -> list[Layer]:
    """Plan a block with one matrix for each side of each module's weight and bias; see :func:`plan_layers`."""
    layers = []
    for owner in _owners(model, params):
        pieces = _pieces(owner.module, owner.params, choices)
        planned = {name for piece in pieces for name in piece.names}
        pieces += [_by_shape(name, p) for name, p in owner.params.items() if name not in planned]
        for names, view, kind in pieces:
            members = tuple(owner.params[name] for name in names)
            layers.append(Layer(owner.full_name(names[0]), members, view, _block(kind, view, members[0], choices)))
    return layers


def diagonal_plan(model: Model, params: Iterable[Tensor] | None) -> list[Layer]:
    """Plan a diagonal block for each parameter; see :func:`plan_layers`."""
    named = [(owner.full_name(name), p) for owner in _owners(model, params) for name, p in owner.params.items()]
    return [
        Layer(n, (p,), ReshapeView(p.shape), DiagonalBlock(p.shape, dtype=p.dtype, device=p.device)) for n, p in named
    ]


def full_plan(model: Model, params: Iterable[Tensor] | None, choices: Choices) -> list[Layer]:
    """Plan one dense block for all parameters together; see :func:`plan_layers`."""
    every = [p for owner in _owners(model, params) for p in owner.params.values()]
    view = ConcatenatedView([p.shape for p in every])
    (size,) = view.shape
    if size > choices.max_dim:
        raise ValueError(
            f"max_dim must be at least the number of parameters, {size}, for Full, got {choices.max_dim}: "
            "use Kronecker or Diagonal, or raise max_dim (memory grows with its square)"
        )
    if len({p.device for p in every}) > 1:
        raise ValueError("model must be on one device for a full preconditioner, got several: move it to one")
    # One matrix for all parameters has the widest of their types.
    dtype = reduce(torch.promote_types, (p.dtype for p in every))
    return [Layer("all", tuple(every), view, FullBlock(size, dtype=dtype, device=every[0].device))]


# --- the parameters of a model, by the module that owns them ---


class _Owner(NamedTuple):
    prefix: str
    module: nn.Module | None
    params: dict[str, Tensor]

    def full_name(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name


def trainable_parameters(model: Model) -> list[Tensor]:
    """Return the parameters of a module or a list that require gradients, each once.

    Example:
        >>> len(trainable_parameters(nn.Linear(2, 2)))
        2
    """
    if isinstance(model, nn.Module):
        candidates = list(model.parameters())
    else:
        candidates = [model] if isinstance(model, Tensor) else list(model)
    for item in candidates:
        if not isinstance(item, Tensor):
            raise TypeError(f"model must be a module, a parameter or a list of parameters, got a {type(item).__name__}")
    return list({id(p): p for p in candidates if p.requires_grad}.values())


def _owners(model: Model, params: Iterable[Tensor] | None) -> list[_Owner]:
    chosen = [p for p in params if p.requires_grad] if params is not None else trainable_parameters(model)
    waiting = {id(p): p for p in chosen}
    if not waiting:
        raise ValueError("model must have a parameter that requires gradients, got none: unfreeze one first")
    owners = []
    if isinstance(model, nn.Module):
        wrapped = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        for prefix, module in (model.module if wrapped else model).named_modules():
            own = dict(module.named_parameters(recurse=False))
            # A tied parameter goes to the first module that has it.
            mine: dict[str, Tensor] = {n: p for n, p in own.items() if waiting.pop(id(p), None) is not None}
            if mine:
                # torch.compile adds a prefix to names; a checkpoint should not depend on it.
                owners.append(_Owner(without_compile_prefix(prefix), module, mine))
    if waiting:
        owners.append(_Owner("parameter", None, {str(index): p for index, p in enumerate(waiting.values())}))
    for owner in owners:
        for name, parameter in owner.params.items():
            full_name = owner.full_name(name)
            if is_lazy(parameter):
                raise ValueError(
                    f"parameter {full_name!r} must have a shape, got a lazy one: run one batch through the model"
                )
            if parameter.is_complex():
                raise TypeError(f"parameter {full_name!r} must be real, got {parameter.dtype}: use torch.view_as_real")
    return owners


# --- the matrices of one module, and their blocks ---


class _Piece(NamedTuple):
    """Some parameters of a module, their view, and the kind of block: matrix, factored, embedding or diagonal."""

    names: tuple[str, ...]
    view: View
    kind: str = "matrix"


def _pieces(module: nn.Module | None, own: Mapping[str, Tensor], choices: Choices) -> list[_Piece]:
    """Return the pieces of a module of a known kind; the rest of its parameters is planned by shape.

    A parameter may be missing in ``own``: frozen, parametrised, or tied to that of another module.
    """
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return [_Piece((name,), ReshapeView(p.shape), "diagonal") for name, p in own.items()]
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        weights = [name for name in own if name.startswith(("weight_ih", "weight_hh"))]
        gates = [own[name].shape[0] // module.hidden_size for name in weights]
        return [_matrix(own, n, n.replace("weight", "bias"), stack) for n, stack in zip(weights, gates, strict=True)]
    if isinstance(module, nn.MultiheadAttention) and "in_proj_weight" in own:
        # With keys or values of another size there are three separate weights instead, each treated by its shape.
        return [_matrix(own, "in_proj_weight", "in_proj_bias", stack=3)]
    if "weight" not in own:
        return []
    shape = own["weight"].shape
    if isinstance(module, (nn.Linear, nn.Bilinear)):
        return [_matrix(own)]
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return [_Piece(("weight",), ChannelsLastView(shape), "factored") if choices.factors(shape) else _matrix(own)]
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        # torch stores [in, out / groups, *k]; transposed, a row belongs to one output as in all other layers.
        transposed = (shape[1] * module.groups, shape[0] // module.groups, *shape[2:])
        factored, bias = choices.factors(transposed), "bias" in own
        inner = ChannelsLastView(transposed) if factored else MatrixView(transposed, bias=bias)
        names = ("weight", "bias") if bias and not factored else ("weight",)
        view = TransposedConvView(shape, module.groups, inner)
        return [_Piece(names, view, "factored" if factored else "matrix")]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return [_Piece(("weight",), ReshapeView(shape), "embedding")]
    return []


def _matrix(own: Mapping[str, Tensor], weight: str = "weight", bias: str = "bias", stack: int | None = None) -> _Piece:
    """Plan a weight as a matrix, with the bias as a column if it has one number per row."""
    # A subclass may have a bias of another shape.
    with_bias = bias in own and own[bias].shape == own[weight].shape[:1]
    view = MatrixView(own[weight].shape, bias=with_bias, stack=stack)
    return _Piece((weight, bias) if with_bias else (weight,), view)


def _by_shape(name: str, parameter: Tensor) -> _Piece:
    # A class token [1, 1, n] counts as a vector and a position embedding [1, length, n] as a matrix.
    sides = [side for side in parameter.shape if side != 1]
    if len(sides) < 2:
        return _Piece((name,), ReshapeView(parameter.shape), "diagonal")
    return _Piece((name,), ReshapeView(parameter.shape, (sides[0], prod(sides[1:]))))


def _block(kind: str, view: View, like: Tensor, choices: Choices) -> Block:
    """Build the block of a piece."""
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    shape = view.shape
    if kind != "diagonal":
        options["matmul"] = choices.matmul
    if kind == "matrix" and len(shape) == 3:
        options["stack"], *shape = shape
    if choices.memory is not None:
        # A dimension, counted from the last one, has a basis if it is not too long.
        mixed = shape if kind in ("matrix", "factored") else ()
        sides = [index - len(shape) for index, side in enumerate(mixed) if 1 < side <= choices.max_dim]
        return EigenbasisBlock(shape, sides, memory=choices.memory, sampled=choices.sampled, **options)
    if kind == "diagonal":
        return DiagonalBlock(shape, **options)
    if kind == "factored":
        outputs, kernel, inputs = shape
        return FactoredConvBlock(outputs, inputs, kernel, *choices.dense(outputs, inputs, kernel), **options)
    rows, cols = shape
    dense_rows, dense_cols = choices.dense(rows, cols)
    # Most words are not in a batch; a factor that mixes the rows of an embedding would move them nevertheless.
    return KroneckerBlock(rows, cols, dense_rows and kind != "embedding", dense_cols, **options)
