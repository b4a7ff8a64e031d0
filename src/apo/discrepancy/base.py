r"""The interface of output-space divergences :math:`\rho`, and the masking and averaging they share.

The function-space discrepancy (FSD) of the proximal objective (Eq. 3) is

.. math:: \mathbb{E}_{\tilde x}\,[\rho(f(\tilde x, \theta'), f(\tilde x, \theta))],

with :math:`\rho \ge 0` and :math:`\rho(z, z) = 0`. A :class:`Discrepancy` maps the outputs at the new weights
:math:`\theta'` and at the old weights :math:`\theta` to the mean of :math:`\rho` over the examples.

**Layout.** The first dimension of an output is the example. A *position* is one entry of the divergence before
averaging: one distribution for :class:`~apo.discrepancy.CategoricalKL`, one element for the others. A mask is a bool
tensor over the leading dimensions of the positions; excluded positions count in neither the sum nor the number of
terms. They are set to zero *before* :math:`\rho` is evaluated, so that NaN or infinity in padding cannot reach the
value or the gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

Reduction = Literal["sum", "mean"]
"""How to reduce the event dimensions of one example: ``"sum"``, or ``"mean"`` over all elements."""
OutputSelector = str | int | Callable[[Any], Any] | None
"""Which output to compare: a key or attribute name, a position, a function of all outputs, or None."""

#: What to do if a network's outputs cannot be compared as a whole; only the discrepancy has this option.
_NAME_ONE = 'name the output to compare, such as discrepancy=apo.CategoricalKL(output="logits")'


class Discrepancy(ABC):
    r"""An output-space divergence, averaged over examples: :math:`\frac1n \sum_i \rho(z'_i, z_i)`.

    Args:
        output: Which of the network's outputs to compare: a key or attribute name, a position, a function of the
            outputs, or None for the entry or attribute ``"logits"`` if there is one and otherwise every floating-point
            tensor (their divergences are added, as for independent heads).

    A subclass implements :meth:`between`.

    Example:
        >>> from apo.discrepancy import SquaredError
        >>> class Doubled(Discrepancy):
        ...     def between(self, new, old, mask, target):
        ...         return 2 * SquaredError()(new, old, mask)
        >>> Doubled()(torch.ones(3, 2), torch.zeros(3, 2)).item()
        2.0
    """

    needs_target: ClassVar[bool] = False
    """Whether the targets of the FSD batch must be passed; only :class:`Bregman` needs them."""

    def __init__(self, output: OutputSelector = None) -> None:
        if output is not None and not isinstance(output, (str, int)) and not callable(output):
            raise TypeError(f"output must be a name, a position, a function or None, got {output!r}")
        self.output = output

    def __call__(self, new: Any, old: Any, mask: Tensor | None = None, target: Any = None) -> Tensor:
        """Return the mean divergence of ``new`` from ``old``, differentiable in ``new`` only.

        Args:
            new: The network's outputs at the new weights.
            old: Its outputs at the old weights, on the same inputs; treated as constant.
            mask: Bool tensor over the leading dimensions; only positions where it is true count. If it is false
                everywhere, the result is 0.
            target: The targets of the batch, for discrepancies with ``needs_target``; ignored by others.

        Returns:
            A scalar of float32 or float64.
        """
        if mask is not None and not (isinstance(mask, Tensor) and mask.dtype == torch.bool):
            raise TypeError(f"mask must be a bool tensor, got {describe(mask)}: pass mask.bool()")
        return self.between(select_output(new, self.output), select_output(old, self.output), mask, target)

    def __repr__(self) -> str:
        """Show the options, so that a choice that ``"auto"`` made can be read."""
        options = {name: value for name, value in vars(self).items() if value is not None}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def sampled_loss(self, outputs: Any, generator: torch.Generator) -> Tensor:
        r"""Return a number whose gradient in the outputs is that of the loss at targets drawn from the outputs.

        The gradient's mean is zero and its covariance, for each position, is the Hessian of :math:`\rho` at equal
        outputs, up to a factor that all positions share.

        Args:
            outputs: What the network returned.
            generator: Draws the targets, on the host.

        Raises:
            TypeError: If the discrepancy belongs to no distribution that can be drawn from.
        """
        raise TypeError(
            f"targets cannot be drawn for {type(self).__name__}: use CategoricalKL, BernoulliKL or SquaredError, or "
            "statistics='gradients'"
        )

    @abstractmethod
    def between(self, new: Any, old: Any, mask: Tensor | None, target: Any) -> Tensor:
        """Evaluate the divergence of the selected outputs; see :meth:`__call__` for the arguments."""


class TensorDiscrepancy(Discrepancy):
    """A discrepancy that compares each output tensor separately and adds the results.

    Args:
        output: See :class:`Discrepancy`.

    Example:
        >>> class Absolute(TensorDiscrepancy):
        ...     def between_tensors(self, new, old, mask):
        ...         return (new - old).abs().mean()
        >>> Absolute()((torch.ones(2), torch.ones(3)), (torch.zeros(2), torch.zeros(3))).item()
        2.0
    """

    def between(self, new: Any, old: Any, mask: Tensor | None, target: Any) -> Tensor:
        """Add the divergences of all paired tensors."""
        del target
        divergences = [self.between_tensors(n, o, mask) for n, o in paired_tensors(new, old)]
        return torch.stack(divergences).sum() if len(divergences) > 1 else divergences[0]

    def sampled_loss(self, outputs: Any, generator: torch.Generator) -> Tensor:
        """Add what each tensor says."""
        selected = select_output(outputs, self.output)
        pairs = paired_tensors(selected, selected)
        return torch.stack([(new * self.residual(old, generator)).mean() for new, old in pairs]).sum()

    def residual(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Return the derivative of the loss in an output, at a target drawn from it; see :meth:`sampled_loss`."""
        return super().sampled_loss(output, generator)  # raises the error

    @abstractmethod
    def between_tensors(self, new: Tensor, old: Tensor, mask: Tensor | None) -> Tensor:
        """Evaluate the divergence of two tensors of the same shape; ``old`` is detached."""


class ElementwiseDiscrepancy(TensorDiscrepancy):
    """A discrepancy that is a sum over the elements of an output, or their mean.

    Args:
        reduction: Over the event dimensions (all but the first): ``"sum"``, or ``"mean"`` over all elements.
        output: See :class:`Discrepancy`.
    """

    def __init__(self, reduction: Reduction, output: OutputSelector) -> None:
        super().__init__(output)
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduction must be 'sum' or 'mean', got {reduction!r}")
        self.reduction: Reduction = reduction

    def between_tensors(self, new: Tensor, old: Tensor, mask: Tensor | None) -> Tensor:
        """Evaluate the divergence for outputs of shape ``[examples, *event]``."""
        new, old = keep_masked_in(mask, new.shape, new, old)
        return average(self.of_elements(new, old), mask, self.reduction)

    @abstractmethod
    def of_elements(self, new: Tensor, old: Tensor) -> Tensor:
        """Return the divergence of each element; zero where both are equal."""


def keep_masked_in(mask: Tensor | None, positions: torch.Size, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Set excluded positions to zero in tensors ``[*positions]`` or ``[*positions, event]``.

    Equal arguments have divergence zero, so excluded positions add nothing.

    Raises:
        ValueError: If the mask does not have the leading dimensions of ``positions``.
    """
    if mask is None:
        return tensors
    if mask.shape != positions[: mask.ndim] or mask.ndim == 0:
        raise ValueError(
            f"mask must have the leading dimensions of {tuple(positions)}, got shape {tuple(mask.shape)}: "
            "pass one bool per example or per position"
        )
    return tuple(
        torch.where(mask.reshape(mask.shape + (1,) * (tensor.ndim - mask.ndim)), tensor, torch.zeros_like(tensor))
        for tensor in tensors
    )


def average(values: Tensor, mask: Tensor | None, reduction: Reduction) -> Tensor:
    """Average elementwise divergences that are already zero wherever the mask is false.

    Args:
        values: Shape ``[examples, *event]`` (or a scalar: one example).
        mask: Bool tensor over the leading dimensions of ``values``, or None.
        reduction: ``"sum"`` divides the total by the number of examples, ``"mean"`` by the number of elements. An
            example counts if the mask keeps any of its elements.

    Returns:
        A scalar; 0 if the mask excludes everything.

    Example:
        >>> average(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([True, False]), "mean").item()
        1.5
    """
    if mask is None:
        count = values.numel() if reduction == "mean" else values.shape[0] if values.ndim else 1
        return values.sum() / max(count, 1)
    if reduction == "mean":
        count = mask.sum() * (values.numel() // max(mask.numel(), 1))
    else:
        count = mask.flatten(start_dim=1).any(dim=1).sum() if mask.ndim > 1 else mask.sum()
    # Clamping instead of branching keeps an all-false mask at 0 without waiting for the device.
    return values.sum() / count.clamp(min=1)


def weigh(probability: Tensor, log_ratio: Tensor) -> Tensor:
    r"""Multiply with :math:`0 \cdot \infty = 0`; where the probability, a constant, is 0, so is the gradient."""
    return torch.where(probability == 0, torch.zeros_like(log_ratio), probability * log_ratio)


def select_output(outputs: Any, selector: OutputSelector) -> Any:
    """Return the part of a network's outputs that the discrepancy compares.

    Args:
        outputs: What the network returned.
        selector: A key (or attribute) name, a position, a function of ``outputs``, or None: the entry or attribute
            ``"logits"`` if there is one, otherwise all of ``outputs``.

    Raises:
        ValueError: If there is no such key or position.

    Example:
        >>> select_output({"logits": 1, "hidden": 2}, None)
        1
        >>> select_output((1, 2), 1)
        2
    """
    if selector is None:
        return outputs.get("logits", outputs) if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
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
            "the network must return a floating-point tensor to compare beside its loss and other numbers, got "
            f"{'nothing else' if new == {} else describe(new)}: let it return its outputs as well, or {_NAME_ONE}"
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
    # A divergence near zero is a difference of nearly equal numbers, which is noise in half precision.
    exact = (torch.float32, torch.float64)
    return new if new.dtype in exact else new.float(), old.detach() if old.dtype in exact else old.detach().float()


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
            f"output{path} must be a tensor or a container of tensors, got {describe(outputs)}: {_NAME_ONE}"
        )
