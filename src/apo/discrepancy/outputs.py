"""Make the outputs of two forward passes comparable: choose an output, walk its structure, pair the tensors.

A network may return a tensor, a tuple or list, a mapping, or an object that behaves like one (Hugging Face models
return ordered mappings). Outputs are recognised by their behaviour, so that no other library has to be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

OutputSelector = str | int | Callable[[Any], Any] | None
"""Which output to compare: a key or attribute name, a position, a function of all outputs, or None."""


def select_output(outputs: Any, selector: OutputSelector) -> Any:
    """Return the part of a network's outputs that the discrepancy compares.

    Args:
        outputs: What the network returned.
        selector: A key (or attribute) name, a position, a function of ``outputs``, or None: the entry ``"logits"`` of a
            mapping that has one, otherwise all of ``outputs``.

    Raises:
        ValueError: If there is no such key or position.

    Example:
        >>> select_output({"logits": 1, "hidden": 2}, None)
        1
        >>> select_output((1, 2), 1)
        2
    """
    if selector is None:
        return outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs
    if callable(selector):
        return selector(outputs)
    try:
        if isinstance(selector, str) and not isinstance(outputs, Mapping):
            return getattr(outputs, selector)
        return outputs[selector]
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ValueError(
            f"output must name one of the network's outputs, {describe(outputs)}, got {selector!r}: pass a key, a "
            "position or a function of the outputs"
        ) from None


def paired_tensors(new: Any, old: Any) -> list[tuple[Tensor, Tensor]]:
    """Pair the floating-point tensors of two outputs of the same structure.

    Both tensors of a pair have the same shape and are at least float32; ``old`` is detached.

    Raises:
        TypeError: If a part is neither a tensor nor a container of tensors, or if none is a floating-point tensor.
        ValueError: If the two differ in structure or in shape.

    Example:
        >>> [(n.item(), o.item()) for n, o in paired_tensors((torch.ones(()), None), (torch.zeros(()), None))]
        [(1.0, 0.0)]
    """
    new_tensors, old_tensors = dict(_floating_tensors(new)), dict(_floating_tensors(old))
    if not new_tensors:
        raise TypeError(
            f"the network must return a floating-point tensor, got {describe(new)}: "
            'name the output to compare, such as output="logits"'
        )
    if new_tensors.keys() != old_tensors.keys():
        raise ValueError(
            f"the network must return the same outputs at both weights, got {describe(new)} at the new and "
            f"{describe(old)} at the old ones: name an output that both have, such as output=0"
        )
    return [comparable_pair(new_tensors[path], old_tensors[path], name=f"output{path}") for path in new_tensors]


def comparable_pair(new: Tensor, old: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Check that two tensors have the same shape; detach ``old`` and convert half precision to float32."""
    if new.shape != old.shape:
        raise ValueError(
            f"{name} must have the same shape at both weights, got {tuple(new.shape)} at the new and "
            f"{tuple(old.shape)} at the old ones: evaluate both on the same FSD batch"
        )
    return _at_least_float32(new), _at_least_float32(old.detach())


def single_tensor(outputs: Any, who: str) -> Tensor:
    """Return ``outputs`` if it is one floating-point tensor, else raise a ``TypeError`` that names ``who``."""
    if isinstance(outputs, Tensor) and outputs.is_floating_point():
        return outputs
    raise TypeError(
        f"output must select one floating-point tensor for {who}, got {describe(outputs)}: "
        'name the output to compare, such as output="logits"'
    )


def describe(outputs: Any) -> str:
    """Describe what a network returned, for error messages.

    Example:
        >>> describe({"logits": torch.zeros(2, 3), "cache": None})
        '{logits: float32 tensor of shape (2, 3), cache: None}'
    """
    if isinstance(outputs, Tensor):
        return f"{str(outputs.dtype).removeprefix('torch.')} tensor of shape {tuple(outputs.shape)}"
    if isinstance(outputs, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in outputs.items()) + "}"
    if isinstance(outputs, (tuple, list)):
        return "(" + ", ".join(describe(value) for value in outputs) + ")"
    return "None" if outputs is None else f"an object of type {type(outputs).__name__}"


def _floating_tensors(outputs: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Walk a structure, skipping integer tensors and None, which have nothing to compare."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            yield path, outputs
    elif isinstance(outputs, Mapping):
        for key, value in outputs.items():
            yield from _floating_tensors(value, f"{path}[{key!r}]")
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str):
        for position, value in enumerate(outputs):
            yield from _floating_tensors(value, f"{path}[{position}]")
    elif outputs is not None:
        raise TypeError(
            f"output{path} must be a tensor or a container of tensors, got {describe(outputs)}: "
            'name the output to compare, such as output="logits"'
        )


def _at_least_float32(tensor: Tensor) -> Tensor:
    # A divergence near zero is a difference of nearly equal numbers, which is noise in half precision.
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
