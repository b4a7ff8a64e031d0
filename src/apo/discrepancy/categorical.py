"""KL divergence between categorical distributions: the FSD of classification and language models."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor

from .base import TensorDiscrepancy, average, keep_masked_in, weigh
from .outputs import OutputSelector


@final
class CategoricalKL(TensorDiscrepancy):
    r"""KL divergence of categorical distributions given by logits or log-probabilities.

    With :math:`p = \mathrm{softmax}(z)` at the old and :math:`q = \mathrm{softmax}(z')` at the new weights,

    .. math:: \rho(z', z) = \mathrm{KL}(p \,\|\, q) = \sum_c p_c (\log p_c - \log q_c),

    averaged over all positions: examples, and tokens or pixels if there are any. Its Hessian in :math:`z'` at
    :math:`z' = z` is :math:`\mathrm{diag}(p) - pp^\top`, so :math:`G` is the Fisher information matrix. It is also the
    Bregman divergence of the cross-entropy, for any targets. Classes whose logit is :math:`-\infty` at both weights
    contribute nothing.

    Args:
        dim: The class dimension, or ``"torch"`` for the convention of ``torch.nn.functional.cross_entropy``: dimension
            1, or 0 if there is only one.
        output: See :class:`Discrepancy`.

    Example:
        >>> rho = CategoricalKL()
        >>> old, new = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])
        >>> round(rho(new, old).item(), 4)
        0.1201
        >>> rho(old, old).item()
        0.0
    """

    def __init__(self, dim: int | Literal["torch"] = -1, output: OutputSelector = None) -> None:
        super().__init__(output)
        if not isinstance(dim, int) and dim != "torch":
            raise ValueError(f"dim must be a dimension of the output or 'torch', got {dim!r}")
        self.dim = dim

    def between_tensors(self, new: Tensor, old: Tensor, mask: Tensor | None) -> Tensor:
        """Evaluate the mean KL divergence for logits whose class dimension is ``dim``."""
        class_dim = self._class_dimension(new)
        new, old = new.movedim(class_dim, -1), old.movedim(class_dim, -1)
        new, old = keep_masked_in(mask, new.shape[:-1], new, old)
        log_q, log_p = torch.log_softmax(new, dim=-1), torch.log_softmax(old, dim=-1)
        # weigh() turns the NaN of classes with logit -inf at both weights into 0.
        return average(weigh(log_p.exp(), log_p - log_q).sum(dim=-1), mask, "mean")

    def residual(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Return the probabilities less one for the class that was drawn."""
        class_dim = self._class_dimension(output)
        p = output.softmax(class_dim)
        threshold = torch.rand(p.narrow(class_dim, 0, 1).shape, generator=generator).to(p)
        drawn = (p.cumsum(class_dim) < threshold).sum(class_dim, keepdim=True).clamp(max=p.shape[class_dim] - 1)
        return p - torch.zeros_like(p).scatter(class_dim, drawn, 1.0)

    def _class_dimension(self, logits: Tensor) -> int:
        dim = self.dim if isinstance(self.dim, int) else min(1, logits.ndim - 1)
        if not -logits.ndim <= dim < logits.ndim or logits.ndim == 0:
            raise ValueError(
                f"dim of CategoricalKL must be a dimension of outputs of shape {tuple(logits.shape)}, got {self.dim!r}"
                ": pass the one that holds the classes"
            )
        if logits.shape[dim] == 1:
            raise ValueError(
                f"dim of CategoricalKL must hold at least two classes, got dimension {dim} of outputs of shape "
                f"{tuple(logits.shape)}: use BernoulliKL, or another dim"
            )
        return dim
