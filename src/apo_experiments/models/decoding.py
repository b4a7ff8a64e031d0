"""Turn a trained Transformer into translations: beam search."""

from __future__ import annotations

import torch
from torch import Tensor

from apo_experiments.models.transformer import Transformer


@torch.no_grad()
def beam_search(
    model: Transformer,
    source: Tensor,
    begin: int,
    end: int,
    max_length: int = 128,
    width: int = 4,
    length_penalty: float = 1.0,
) -> Tensor:
    """Translate by following the ``width`` most likely beginnings at once; 1 is greedy search.

    Finished hypotheses are ranked by log-likelihood divided by ``length ** length_penalty``, end mark included.

    Args:
        model: In evaluation mode, or dropout is applied.
        source: Words ``[batch, source length]``.
        begin: Index of the begin mark.
        end: Index of the end mark.
        max_length: The most words of a translation.
        width: Number of hypotheses kept for each sentence.
        length_penalty: Exponent of the length.

    Returns:
        Words ``[batch, length]`` without the begin mark; the end mark and everything after it are padding.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}: 1 is greedy search")
    batch, device = source.shape[0], source.device
    source = source.repeat_interleave(width, 0)
    memory = model.encode(source)
    words = torch.full((batch * width, 1), begin, dtype=torch.long, device=device)
    # All hypotheses of a sentence are equal at first, so only one of them counts.
    scores = torch.full((batch, width), -torch.inf, device=device)
    scores[:, 0] = 0.0
    lengths = torch.zeros(batch, width, device=device)
    finished = torch.zeros(batch, width, dtype=torch.bool, device=device)
    for _ in range(max_length):
        logits = model.decode(words, memory, source)[:, -1].float().unflatten(0, (batch, width)).clone()
        logits[..., model.padding] = -torch.inf
        # A finished hypothesis continues with padding, at no cost.
        idle = torch.full_like(logits, -torch.inf)
        idle[..., model.padding] = 0.0
        gains = torch.where(finished.unsqueeze(-1), idle, logits.log_softmax(-1))
        scores, best = (scores.unsqueeze(-1) + gains).flatten(1).topk(width)
        parents, chosen = best // gains.shape[-1], best % gains.shape[-1]
        rows = (parents + torch.arange(batch, device=device).unsqueeze(1) * width).flatten()
        words = torch.cat([words[rows], chosen.flatten().unsqueeze(1)], dim=1)
        finished, lengths = finished.gather(1, parents), lengths.gather(1, parents)
        lengths = lengths + (~finished).float()
        finished = finished | (chosen == end)
        if bool(finished.all()):
            break
    winners = (scores / lengths**length_penalty).argmax(1)
    translations = words.unflatten(0, (batch, width))[torch.arange(batch, device=device), winners, 1:]
    return translations.masked_fill(translations == end, model.padding)
