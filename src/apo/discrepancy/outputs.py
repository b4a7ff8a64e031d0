"""What networks return, made comparable: choose an output, walk its structure, pair the tensors.

A network may return a tensor, a tuple or list, a mapping, or an object that behaves like one (the outputs of
Hugging Face models are ordered mappings). Everything here is told apart by its behaviour, so that no other
library needs to be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

OutputSelector = str | int | Callable[[Any], Any] | None
"""How the compared output is named: a key or attribute, a position, a function of all outputs, or nothing."""


def select_output(outputs: Any, selector: OutputSelector) -> Any:
    """Take the part of a network's outputs that the discrepancy compares.

    Args:
        outputs: What the network returned.
        selector: A key (or attribute) name, a position, a function of ``outputs``, or ``None``: the entry
            ``"logits"`` of a mapping that has one, otherwise all of ``outputs``.

    Returns:
        The selected part.

    Raises:
        ValueError: If a named key or position is not there.

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
            f"output={selector!r} is not in the network's outputs, which are {describe(outputs)}; "
            "pass the name, position or function of one that is."
        ) from None


def paired_tensors(new: Any, old: Any) -> list[tuple[Tensor, Tensor]]:
    """Pair the floating tensors of two outputs of the same structure.

    Args:
        new: Selected outputs at the new weights.
        old: Selected outputs at the old weights.

    Returns:
        One ``(new, old)`` pair of equal shape for each floating tensor; ``old`` is detached, both are at
        least float32.

    Raises:
        TypeError: If a part is neither a tensor nor a container of tensors, or no part is floating.
        ValueError: If the two differ in structure or in shape.

    Example:
        >>> [(n.item(), o.item()) for n, o in paired_tensors((torch.ones(()), None), (torch.zeros(()), None))]
        [(1.0, 0.0)]
    """
    new_tensors, old_tensors = dict(_floating_tensors(new)), dict(_floating_tensors(old))
    if not new_tensors:
        raise TypeError(
            f"A discrepancy compares floating-point outputs, but the network returned {describe(new)}; "
            'name the output to compare, such as output="logits".'
        )
    if new_tensors.keys() != old_tensors.keys():
        raise ValueError(
            f"The outputs at the new weights are {describe(new)} but at the old weights {describe(old)}; "
            "name one that both have, such as output=0."
        )
    return [comparable_pair(new_tensors[path], old_tensors[path], name=f"output{path}") for path in new_tensors]


def comparable_pair(new: Tensor, old: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Check that two tensors have one shape; detach ``old`` and raise half precision to float32."""
    if new.shape != old.shape:
        raise ValueError(
            f"{name} has shape {tuple(new.shape)} at the new weights but {tuple(old.shape)} at the old ones; "
            "evaluate both on the same FSD batch."
        )
    return _at_least_float32(new), _at_least_float32(old.detach())


def single_tensor(outputs: Any, who: str) -> Tensor:
    """Return ``outputs`` if it is one floating tensor, else raise a ``TypeError`` in the name of ``who``."""
    if isinstance(outputs, Tensor) and outputs.is_floating_point():
        return outputs
    raise TypeError(
        f"{who} compares one floating-point tensor, but the network returned {describe(outputs)}; "
        'name the output to compare, such as output="logits".'
    )


def describe(outputs: Any) -> str:
    """Say in a few words what a network returned, for error messages.

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
    """Walk a structure; integer tensors and ``None`` carry nothing to compare and are passed over."""
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
            f"output{path} is {describe(outputs)}, which holds no tensors that a discrepancy could compare; "
            'name the output to compare, such as output="logits".'
        )


def _at_least_float32(tensor: Tensor) -> Tensor:
    """A divergence near zero is a difference of near-equal numbers: half precision would leave only noise."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
