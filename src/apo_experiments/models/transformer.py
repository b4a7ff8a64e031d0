"""The encoder-decoder Transformer of the translation experiment (Vaswani et al., 2017), and its translations.

Every projection is a separate ``nn.Linear``, so that methods with one block of curvature per layer see each of them.
Sentences are padded at the end. The decoder's self-attention is causal, so a real word never attends to padding and
only the source needs a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional


@final
class Transformer(nn.Module):
    """Map a source sentence and the words so far to logits of the next word.

    Args:
        vocabulary: Number of words of the joint vocabulary.
        layers: Of the encoder and of the decoder.
        dimension: Of embeddings and hidden vectors, an even number.
        feed_forward: Units of the feed-forward layers.
        heads: Attention heads, a divisor of the dimension.
        dropout: On embeddings and on the output of every sublayer.
        norm_first: LayerNorm before each sublayer instead of after its residual connection.
        padding: Index of the padding word.
        max_length: The longest sentence.
    """

    def __init__(
        self,
        vocabulary: int,
        layers: int = 6,
        dimension: int = 512,
        feed_forward: int = 1024,
        heads: int = 4,
        dropout: float = 0.3,
        norm_first: bool = False,
        padding: int = 0,
        max_length: int = 512,
    ) -> None:
        super().__init__()
        if dimension % 2 or dimension % heads:
            raise ValueError(f"dimension must be even and a multiple of heads ({heads}), got {dimension}")
        self.padding = padding
        self.scale = math.sqrt(dimension)
        # One matrix for source, target and output.
        self.embedding = nn.Embedding(vocabulary, dimension, padding_idx=padding)
        with torch.no_grad():
            self.embedding.weight.normal_(std=dimension**-0.5)[padding].zero_()
        self.dropout = nn.Dropout(dropout)
        options = (dimension, feed_forward, heads, dropout, norm_first)
        self.encoder = nn.ModuleList(_EncoderLayer(*options) for _ in range(layers))
        self.decoder = nn.ModuleList(_DecoderLayer(*options) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(dimension) if norm_first else nn.Identity()
        self.decoder_norm = nn.LayerNorm(dimension) if norm_first else nn.Identity()
        self.register_buffer("positions", _sinusoids(max_length, dimension), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits of the next word at every place.

        Args:
            source: Words ``[batch, source length]``, padded at the end.
            target: Words so far ``[batch, target length]``: the begin mark, then the translation.

        Returns:
            Logits ``[batch, target length, vocabulary]``.
        """
        return self.decode(target, self.encode(source), source)

    def encode(self, source: Tensor) -> Tensor:
        """Return the encoder's vectors ``[batch, source length, dimension]``."""
        hidden, mask = self._embed(source), self._mask(source)
        for layer in self.encoder:
            hidden = layer(hidden, mask)
        return self.encoder_norm(hidden)

    def decode(self, target: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        """Return logits for the words so far, given what :meth:`encode` returned for ``source``."""
        hidden, mask = self._embed(target), self._mask(source)
        for layer in self.decoder:
            hidden = layer(hidden, memory, mask)
        return functional.linear(self.decoder_norm(hidden), self.embedding.weight)

    def _embed(self, words: Tensor) -> Tensor:
        positions: Tensor = self.positions  # type: ignore[assignment]
        if words.shape[1] > len(positions):
            raise ValueError(
                f"max_length must be at least the length of a sentence, {words.shape[1]}, got {len(positions)}"
            )
        vectors = self.embedding(words)
        return self.dropout(vectors * self.scale + positions[: words.shape[1]].to(vectors.dtype))

    def _mask(self, source: Tensor) -> Tensor:
        return (source != self.padding)[:, None, None, :]


class Attention(nn.Module):
    """Multi-head attention."""

    def __init__(self, dimension: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(dimension, dimension) for _ in range(4))

    def forward(self, hidden: Tensor, memory: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Let ``hidden`` attend to ``memory``, both ``[batch, length, dimension]``."""
        # Each ``[batch, heads, length, dimension / heads]``.
        query, key, value = (
            vectors.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for vectors in (self.query(hidden), self.key(memory), self.value(memory))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        return self.output(mixed.transpose(1, 2).flatten(2))


class _Sublayer(nn.Module):
    """A residual connection with dropout and LayerNorm around what a layer does."""

    def __init__(self, dimension: int, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.norm, self.dropout, self.norm_first = nn.LayerNorm(dimension), nn.Dropout(dropout), norm_first

    def forward(self, hidden: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return hidden + self.dropout(layer(self.norm(hidden)))
        return self.norm(hidden + self.dropout(layer(hidden)))


def _feed_forward(dimension: int, units: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dimension, units), nn.ReLU(), nn.Linear(units, dimension))


class _EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network."""

    def __init__(self, dimension: int, feed_forward: int, heads: int, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(dimension, heads), _feed_forward(dimension, feed_forward)
        self.around_attention, self.around_feed_forward = (_Sublayer(dimension, dropout, norm_first) for _ in range(2))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = self.around_attention(hidden, lambda seen: self.attention(seen, seen, mask))
        return self.around_feed_forward(hidden, self.feed_forward)


class _DecoderLayer(nn.Module):
    """Causal self-attention, attention to the source and a feed-forward network."""

    def __init__(self, dimension: int, feed_forward: int, heads: int, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.attention, self.source_attention = Attention(dimension, heads), Attention(dimension, heads)
        self.feed_forward = _feed_forward(dimension, feed_forward)
        self.around_attention, self.around_source, self.around_feed_forward = (
            _Sublayer(dimension, dropout, norm_first) for _ in range(3)
        )

    def forward(self, hidden: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        hidden = self.around_attention(hidden, lambda seen: self.attention(seen, seen, causal=True))
        hidden = self.around_source(hidden, lambda seen: self.source_attention(seen, memory, mask))
        return self.around_feed_forward(hidden, self.feed_forward)


def _sinusoids(length: int, dimension: int) -> Tensor:
    """Return the position vectors ``[length, dimension]``: sines in the first half, cosines in the second."""
    frequencies = torch.exp(torch.arange(0, dimension, 2) * (-math.log(10000.0) / dimension))
    angles = torch.arange(length).unsqueeze(1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


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
