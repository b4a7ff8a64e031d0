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
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .outputs import OutputSelector, describe, paired_tensors, select_output

Reduction = Literal["sum", "mean"]
"""How to reduce the event dimensions of one example: ``"sum"``, or ``"mean"`` over all elements."""


class Discrepancy(ABC):
    r"""An output-space divergence, averaged over examples: :math:`\frac1n \sum_i \rho(z'_i, z_i)`.

    Args:
        output: Which of the network's outputs to compare: a key or attribute name, a position, a function of the
            outputs, or None for the entry ``"logits"`` if there is one and otherwise every floating-point tensor (their
            divergences are added, as for independent heads).

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


def check_reduction(reduction: str) -> Reduction:
    """Return ``reduction`` if it is ``"sum"`` or ``"mean"``, else raise a ``ValueError``."""
    if reduction == "sum" or reduction == "mean":
        return reduction
    raise ValueError(f"reduction must be 'sum' or 'mean', got {reduction!r}")


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
