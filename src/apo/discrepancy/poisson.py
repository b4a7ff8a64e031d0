"""KL divergence between Poisson variables: outputs that predict counts."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from .base import Reduction, TensorDiscrepancy, average, check_reduction, keep_masked_in
from .outputs import OutputSelector

#: What ``torch.nn.PoissonNLLLoss`` adds to a rate before it takes the logarithm.
_EPS = 1e-8


@final
class PoissonKL(TensorDiscrepancy):
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
        super().__init__(output)
        self.log_input = log_input
        self.reduction: Reduction = check_reduction(reduction)

    def between_tensors(self, new: Tensor, old: Tensor, mask: Tensor | None) -> Tensor:
        """Evaluate the KL divergence for outputs of shape ``[examples, *event]``."""
        new, old = keep_masked_in(mask, new.shape, new, old)
        if self.log_input:
            change, rate = new - old, old.exp()
            # expm1 keeps the digits of a small change; the difference of two rates would not.
            return average(rate * (torch.expm1(change) - change), mask, self.reduction)
        log_ratio = (old + _EPS).log() - (new + _EPS).log()
        return average(old * log_ratio + new - old, mask, self.reduction)
