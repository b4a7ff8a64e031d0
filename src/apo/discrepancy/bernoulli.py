"""KL divergence between independent Bernoulli variables: binary and multi-label outputs, autoencoders."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor
from torch.nn import functional

from .base import Reduction, TensorDiscrepancy, average, check_reduction, keep_masked_in, weigh
from .outputs import OutputSelector


@final
class BernoulliKL(TensorDiscrepancy):
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
        super().__init__(output)
        if of not in ("logits", "probabilities"):
            raise ValueError(f'of must be "logits" or "probabilities", got {of!r}: say what the network returns')
        self.reduction: Reduction = check_reduction(reduction)
        self.of = of

    def between_tensors(self, new: Tensor, old: Tensor, mask: Tensor | None) -> Tensor:
        """Evaluate the KL divergence for outputs of shape ``[examples, *event]``."""
        new, old = keep_masked_in(mask, new.shape, new, old)
        if self.of == "probabilities":
            return average(_between_probabilities(new, old), mask, self.reduction)
        # log(1 - sigmoid(z)) = logsigmoid(-z), which keeps its digits where sigmoid(z) rounds to 1.
        if_one = weigh(torch.sigmoid(old), functional.logsigmoid(old) - functional.logsigmoid(new))
        if_zero = weigh(torch.sigmoid(-old), functional.logsigmoid(-old) - functional.logsigmoid(-new))
        return average(if_one + if_zero, mask, self.reduction)

    def residual(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Return the probability less what was drawn, and the derivative of that in a probability."""
        p = output.sigmoid() if self.of == "logits" else output
        residual = p - (torch.rand(p.shape, generator=generator).to(p) < p).to(p)
        if self.of == "logits":
            return residual
        return residual / (p * (1 - p)).clamp(min=torch.finfo(p.dtype).eps)


def _between_probabilities(new: Tensor, old: Tensor) -> Tensor:
    """Return the divergence of each element; a saturated output, whose logarithm is infinite, has no gradient."""
    smallest, largest = torch.finfo(new.dtype).tiny, 1 - torch.finfo(new.dtype).eps
    if_one = old * (old.clamp(min=smallest).log() - new.clamp(min=smallest).log())
    if_zero = (1 - old) * (torch.log1p(-old.clamp(max=largest)) - torch.log1p(-new.clamp(max=largest)))
    return if_one + if_zero
