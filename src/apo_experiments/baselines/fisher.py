r"""Gradients of log-likelihoods at targets that the network itself draws: what the true Fisher is made of.

With outputs :math:`z` and targets :math:`y \sim p(y | z)`, the Fisher information of the weights is
:math:`F = \mathbb{E}[J^\top s s^\top J]` with the score :math:`s = -\nabla_z \log p(y | z)` and the Jacobian
:math:`J` of the network. The scores have closed forms:

===============  ============================================  ==================
kind             distribution                                  s
===============  ============================================  ==================
categorical      softmax of logits                             softmax(z) - one-hot(y)
bernoulli        independent sigmoids of logits                sigmoid(z) - y
gaussian         mean z, unit variance (squared error)         z - y
===============  ============================================  ==================
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

#: Output distributions.
KINDS = ("categorical", "bernoulli", "gaussian")


@torch.no_grad()
def sampled_score(output: Tensor, kind: str, generator: torch.Generator | None = None) -> Tensor:
    """Draw targets from the network's own distribution and return the gradient of minus their log-likelihood.

    Args:
        output: Logits or means; the classes of ``"categorical"`` are the last dimension.
        kind: One of :data:`KINDS`.
        generator: Source of randomness on the output's device.

    Returns:
        The score of every case, of the output's shape.
    """
    if kind == "categorical":
        # The largest of logits plus Gumbel noise is a draw from the softmax; torch.multinomial would wait for the host.
        noise = torch.empty_like(output).exponential_(generator=generator)
        drawn = (output - noise.log()).argmax(-1)
        return output.softmax(-1) - functional.one_hot(drawn, output.shape[-1]).to(output.dtype)
    if kind == "bernoulli":
        likely = output.sigmoid()
        return likely - torch.bernoulli(likely, generator=generator)
    if kind == "gaussian":
        return torch.empty_like(output).normal_(generator=generator)
    raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
