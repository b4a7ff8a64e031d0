"""From a model to blocks: every parameter that trains belongs to exactly one layer of the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from apo.preconditioners.block import Block
from apo.preconditioners.diagonal_block import DiagonalBlock
from apo.preconditioners.full_block import FullBlock
from apo.preconditioners.modules import Limits, kronecker_pieces
from apo.preconditioners.views import ConcatenatedView, ReshapeView, View

__all__ = ["Layer", "plan_layers", "trainable_parameters"]


class Layer(NamedTuple):
    """Parameters that share a block.

    Attributes:
        name: The name of the first parameter in the model, such as ``"encoder.0.weight"``; unique in a plan.
        params: The parameters.
        view: How they become the tensor that the block takes.
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


class _Owner(NamedTuple):
    prefix: str
    module: nn.Module | None
    params: dict[str, Tensor]

    def full_name(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name


def plan_layers(
    model: nn.Module | Tensor | Iterable[Tensor],
    structure: str = "kronecker",
    *,
    conv: str = "matrix",
    max_dim: int = 8192,
    params: Iterable[Tensor] | None = None,
) -> list[Layer]:
    """Give every parameter of a model a block.

    With ``structure="kronecker"`` the module that owns a parameter decides: see
    :mod:`apo.preconditioners.modules`. A parameter that several modules share is planned once, for the first
    of them. Parameters that do not require gradients are left out.

    Args:
        model: A module, or parameters that belong to none.
        structure: ``"kronecker"``, ``"diagonal"``, or ``"full"`` (one block for all parameters together).
        conv: ``"matrix"`` or ``"factored"``: how the Kronecker structure treats convolutions.
        max_dim: The longest side that gets a dense factor; for ``"full"`` the largest number of parameters.
        params: If given, plan these alone; those that the model does not own are treated by their shape.

    Returns:
        Layers in the order of the model's modules, then the parameters that belong to no module.

    Raises:
        ValueError: If an argument is out of range, there is nothing to plan, or the full structure is too
            large.
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
    if structure not in ("kronecker", "diagonal", "full"):
        raise ValueError(f"structure is {structure!r}: pass 'kronecker', 'diagonal' or 'full'.")
    limits = Limits(conv, max_dim)
    owners = _owners(model, None if params is None else list(params))
    if structure == "full":
        return [_full_layer([p for owner in owners for p in owner.params.values()], max_dim)]
    if structure == "diagonal":
        return [_diagonal_layer(owner.full_name(name), p) for owner in owners for name, p in owner.params.items()]
    return [layer for owner in owners for layer in _kronecker_layers(owner, limits)]


def trainable_parameters(model: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters of a module, or of what stands for one, that require gradients, each once.

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
            raise TypeError(f"model holds a {type(item).__name__}: pass a module, a parameter or a list of parameters.")
    return list({id(p): p for p in candidates if p.requires_grad}.values())


def _owners(model: nn.Module | Tensor | Iterable[Tensor], params: list[Tensor] | None) -> list[_Owner]:
    chosen = [p for p in params if p.requires_grad] if params is not None else trainable_parameters(model)
    waiting = {id(p): p for p in chosen}
    if not waiting:
        raise ValueError("model has no parameter that requires gradients: unfreeze one before this.")
    owners = []
    if isinstance(model, nn.Module):
        for prefix, module in _unwrapped(model).named_modules():
            own = dict(module.named_parameters(recurse=False))
            mine: dict[str, Tensor] = {n: p for n, p in own.items() if waiting.pop(id(p), None) is not None}
            if mine:
                # torch.compile puts a wrapper into the names; a checkpoint should not depend on it.
                parts = [part for part in prefix.split(".") if part != "_orig_mod"]
                owners.append(_Owner(".".join(parts), module, mine))
    if waiting:
        loose = {str(index): p for index, p in enumerate(waiting.values())}
        owners.append(_Owner("parameter", None, loose))
    for owner in owners:
        for name, parameter in owner.params.items():
            _check_parameter(owner.full_name(name), parameter)
    return owners


def _unwrapped(model: nn.Module) -> nn.Module:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return model.module
    return model


def _check_parameter(name: str, parameter: Tensor) -> None:
    if is_lazy(parameter):
        raise ValueError(f"parameter {name!r} has no shape yet: run one batch through the model before this.")
    if parameter.is_complex():
        raise TypeError(f"parameter {name!r} is complex: keep its real view (torch.view_as_real) as the parameter.")


def _diagonal_layer(name: str, parameter: Tensor) -> Layer:
    block = DiagonalBlock(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return Layer(name, (parameter,), ReshapeView(parameter.shape), block)


def _full_layer(params: Sequence[Tensor], max_dim: int) -> Layer:
    view = ConcatenatedView([p.shape for p in params])
    (size,) = view.shape
    if size > max_dim:
        raise ValueError(
            f"the model has {size} parameters, but max_dim allows a full preconditioner {max_dim}: "
            "use Kronecker or Diagonal, or raise max_dim (memory grows with its square)."
        )
    if len({p.device for p in params}) > 1:
        raise ValueError("the parameters lie on several devices: a full preconditioner needs them on one.")
    dtype = reduce(torch.promote_types, (p.dtype for p in params))
    return Layer("all", tuple(params), view, FullBlock(size, dtype=dtype, device=params[0].device))


def _kronecker_layers(owner: _Owner, limits: Limits) -> list[Layer]:
    layers = []
    for names, view, block in kronecker_pieces(owner.module, owner.params, limits):
        params = tuple(owner.params[name] for name in names)
        layers.append(Layer(owner.full_name(names[0]), params, view, block))
    return layers
