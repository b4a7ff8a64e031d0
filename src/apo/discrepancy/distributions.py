"""KL divergences: outputs that stand for a distribution, and how far that has moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.nn import functional

from .base import (
    ElementwiseDiscrepancy,
    OutputSelector,
    Reduction,
    TensorDiscrepancy,
    average,
    comparable_pair,
    describe,
    keep_masked_in,
    weigh,
)

#: What ``torch.nn.PoissonNLLLoss`` adds to a rate before it takes the logarithm.
_EPS = 1e-8
#: What ``torch.nn.GaussianNLLLoss`` raises smaller variances to.
_SMALLEST_VARIANCE = 1e-6


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
        if class_dim not in (-1, new.ndim - 1):
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
                ": pass the one that holds the classes, and let the network return its outputs beside a loss"
            )
        if logits.shape[dim] == 1:
            raise ValueError(
                f"dim of CategoricalKL must hold at least two classes, got dimension {dim} of outputs of shape "
                f'{tuple(logits.shape)}: pass discrepancy=apo.SquaredError("mean") for a regression, '
                'apo.BernoulliKL("mean") for binary logits, or another dim'
            )
        return dim


@final
class BernoulliKL(ElementwiseDiscrepancy):
    r"""KL divergence of independent Bernoulli variables given by logits or by probabilities.

    With :math:`p = \mathrm{sigmoid}(z)` at the old and :math:`q = \mathrm{sigmoid}(z')` at the new weights, each output
    contributes

    .. math:: \mathrm{KL}(p \,\|\, q) = p \log\frac{p}{q} + (1 - p) \log\frac{1 - p}{1 - q},

    whose second derivative in :math:`z'` at :math:`z' = z` is :math:`p(1 - p)`.

    Args:
        reduction: Over the event dimensions (all but the first). ``"sum"`` gives the KL divergence of the joint
            distribution of one example, averaged over examples. ``"mean"`` averages over all elements, which is the
            Bregman divergence of ``torch.nn.functional.binary_cross_entropy_with_logits``.
        output: See :class:`Discrepancy`.
        of: What the outputs are: ``"logits"``, or ``"probabilities"`` as ``torch.nn.BCELoss`` takes them.

    Example:
        >>> old, new = torch.zeros(4, 3), torch.ones(4, 3)
        >>> round(BernoulliKL()(new, old).item(), 4), round(BernoulliKL("mean")(new, old).item(), 4)
        (0.3603, 0.1201)
        >>> round(BernoulliKL("mean", of="probabilities")(new.sigmoid(), old.sigmoid()).item(), 4)
        0.1201
    """

    def __init__(
        self,
        reduction: Reduction = "sum",
        output: OutputSelector = None,
        of: Literal["logits", "probabilities"] = "logits",
    ) -> None:
        super().__init__(reduction, output)
        if of not in ("logits", "probabilities"):
            raise ValueError(f'of must be "logits" or "probabilities", got {of!r}: say what the network returns')
        self.of = of

    def of_elements(self, new: Tensor, old: Tensor) -> Tensor:
        """Return the KL divergence of each variable."""
        if self.of == "logits":
            # log(1 - sigmoid(z)) = logsigmoid(-z), which keeps its digits where sigmoid(z) rounds to 1.
            if_one = weigh(torch.sigmoid(old), functional.logsigmoid(old) - functional.logsigmoid(new))
            return if_one + weigh(torch.sigmoid(-old), functional.logsigmoid(-old) - functional.logsigmoid(-new))
        # A saturated output, whose logarithm is infinite, has no gradient.
        smallest, largest = torch.finfo(new.dtype).tiny, 1 - torch.finfo(new.dtype).eps
        if_one = old * (old.clamp(min=smallest).log() - new.clamp(min=smallest).log())
        return if_one + (1 - old) * (torch.log1p(-old.clamp(max=largest)) - torch.log1p(-new.clamp(max=largest)))

    def residual(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Return the probability less what was drawn, and the derivative of that in a probability."""
        p = output.sigmoid() if self.of == "logits" else output
        residual = p - (torch.rand(p.shape, generator=generator).to(p) < p).to(p)
        if self.of == "logits":
            return residual
        return residual / (p * (1 - p)).clamp(min=torch.finfo(p.dtype).eps)


@final
class PoissonKL(ElementwiseDiscrepancy):
    r"""KL divergence of independent Poisson variables given by the logarithms of their rates, or by the rates.

    With rates :math:`\lambda` at the old and :math:`\lambda'` at the new weights, each output contributes

    .. math:: \mathrm{KL} = \lambda \log\frac{\lambda}{\lambda'} + \lambda' - \lambda,

    whose second derivative in :math:`\log\lambda'` at :math:`\lambda' = \lambda` is :math:`\lambda`.

    Args:
        log_input: Whether the outputs are logarithms of rates, as ``torch.nn.PoissonNLLLoss`` has it by default.
        reduction: Over the event dimensions (all but the first): ``"sum"`` gives the KL divergence of the joint
            distribution of one example; ``"mean"`` averages over all elements, which is the Bregman divergence of
            ``torch.nn.functional.poisson_nll_loss``.
        output: See :class:`Discrepancy`.

    Example:
        >>> old, new = torch.zeros(4, 3), torch.ones(4, 3)
        >>> round(PoissonKL()(new, old).item(), 4)
        2.1548
        >>> round(PoissonKL(log_input=False)(new.exp(), old.exp()).item(), 4)
        2.1548
    """

    def __init__(self, log_input: bool = True, reduction: Reduction = "sum", output: OutputSelector = None) -> None:
        self.log_input = log_input
        super().__init__(reduction, output)

    def of_elements(self, new: Tensor, old: Tensor) -> Tensor:
        """Return the KL divergence of each variable."""
        if self.log_input:
            # expm1 keeps the digits of a small change; the difference of two rates would not.
            return old.exp() * (torch.expm1(new - old) - (new - old))
        return old * ((old + _EPS).log() - (new + _EPS).log()) + new - old


@final
class GaussianKL(ElementwiseDiscrepancy):
    r"""KL divergence of Gaussians with diagonal covariance.

    With mean :math:`m` and variance :math:`v` at the old, :math:`m'` and :math:`v'` at the new weights, each output
    contributes

    .. math:: \mathrm{KL} = \tfrac12 \Big[\log\frac{v'}{v} + \frac{v + (m' - m)^2}{v'} - 1\Big].

    Its Hessian in :math:`(m', \log v')` at the old values is :math:`\mathrm{diag}(1/v, 1/2)`, the Fisher information.

    Args:
        variance: A known variance; every floating-point output is then a mean. With None the network predicts the
            variance too: it returns a pair ``(mean, log_variance)``, or a mapping with these two keys.
        reduction: Over the event dimensions (all but the first): ``"sum"`` gives the KL divergence of the joint
            distribution of one example, averaged over examples; ``"mean"`` averages over all elements.
        output: See :class:`Discrepancy`.
        of: What a learned variance comes as: ``"log_variance"``, or ``"variance"`` as ``torch.nn.GaussianNLLLoss``
            takes it.

    Example:
        >>> mean, log_variance = torch.zeros(4, 3), torch.zeros(4, 3)
        >>> GaussianKL()((mean + 1, log_variance), (mean, log_variance)).item()
        1.5
        >>> GaussianKL(variance=0.5)(mean + 1, mean).item()
        3.0
    """

    def __init__(
        self,
        variance: float | None = None,
        reduction: Reduction = "sum",
        output: OutputSelector = None,
        of: Literal["log_variance", "variance"] = "log_variance",
    ) -> None:
        if of not in ("log_variance", "variance"):
            raise ValueError(f'of must be "log_variance" or "variance", got {of!r}: say what the network returns')
        self.of = of
        if variance is not None and not variance > 0:
            raise ValueError(f"variance must be positive, got {variance}: pass None if the network predicts it")
        self.variance = variance
        super().__init__(reduction, output)

    def of_elements(self, new: Tensor, old: Tensor) -> Tensor:
        """Return the KL divergence of each variable, for means with a known variance."""
        assert self.variance is not None
        return (new - old).square() / (2 * self.variance)

    def between(self, new: Any, old: Any, mask: Tensor | None, target: Any) -> Tensor:
        """Evaluate the KL divergence for means alone or for pairs of mean and variance."""
        if self.variance is not None:
            return super().between(new, old, mask, target)
        (new_mean, new_log), (old_mean, old_log) = self._mean_and_log_variance(new), self._mean_and_log_variance(old)
        pairs = (*comparable_pair(new_mean, old_mean, "mean"), *comparable_pair(new_log, old_log, "log_variance"))
        pairs = torch.broadcast_tensors(*pairs)
        new_mean, old_mean, new_log, old_log = keep_masked_in(mask, pairs[0].shape, *pairs)
        log_ratio = new_log - old_log
        # expm1(-d) + d keeps its digits for a small change d of the log-variance; exp(-d) - 1 + d would not.
        divergence = torch.expm1(-log_ratio) + log_ratio + (new_mean - old_mean).square() * torch.exp(-new_log)
        return average(divergence / 2, mask, self.reduction)

    def _mean_and_log_variance(self, outputs: Any) -> tuple[Tensor, Tensor]:
        is_named = isinstance(outputs, Mapping) and "mean" in outputs and self.of in outputs
        pair = (outputs["mean"], outputs[self.of]) if is_named else outputs
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not (is_pair and all(isinstance(part, Tensor) and part.is_floating_point() for part in pair)):
            raise TypeError(
                f"outputs must be (mean, {self.of}) for GaussianKL without a variance, got {describe(outputs)}: "
                "return both from the network, or pass variance=..."
            )
        mean, variance = pair
        return mean, variance.clamp(min=_SMALLEST_VARIANCE).log() if self.of == "variance" else variance
