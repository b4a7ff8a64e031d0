"""A small GPT: a causal Transformer that guesses the next character."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from apo_experiments.models.transformer import Attention


@final
class GPT(nn.Module):
    """Map characters to logits of the next one; every position of a batch is an example.

    LayerNorm comes first in each sublayer, as in GPT-2; the output layer has its own weights.

    Args:
        vocabulary: Number of characters.
        context: The longest text.
        layers: Number of blocks.
        dimension: Of embeddings and hidden vectors, a multiple of ``heads``.
        heads: Attention heads.
        dropout: On embeddings and on the output of every sublayer.

    Raises:
        ValueError: ``dimension`` is not a multiple of ``heads``.

    Example:
        >>> import torch
        >>> GPT(50, context=8, layers=1, dimension=8, heads=2)(torch.ones(3, 8, dtype=torch.long)).shape
        torch.Size([24, 50])
    """

    def __init__(
        self,
        vocabulary: int,
        context: int = 128,
        layers: int = 4,
        dimension: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dimension % heads:
            raise ValueError(f"dimension must be a multiple of heads ({heads}), got {dimension}")
        self.characters = nn.Embedding(vocabulary, dimension)
        self.places = nn.Embedding(context, dimension)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(dimension, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dimension)
        self.output = nn.Linear(dimension, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:  # residual sums keep their size whatever the depth
            for layer in (block.attention.output, block.feed_forward[-1]):  # type: ignore[union-attr, index]
                nn.init.normal_(layer.weight, std=0.02 / (2 * layers) ** 0.5)  # type: ignore[arg-type, union-attr]

    def forward(self, text: Tensor) -> Tensor:
        """Map characters ``[batch, length]`` to logits ``[batch * length, vocabulary]``."""
        hidden = self.dropout(self.characters(text) + self.places.weight[: text.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)
        return self.output(self.norm(hidden)).flatten(0, 1)


class _Block(nn.Module):
    """Causal self-attention and a feed-forward network."""

    def __init__(self, dimension: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = nn.LayerNorm(dimension), nn.LayerNorm(dimension)
        self.attention = Attention(dimension, heads)
        self.feed_forward = nn.Sequential(
            nn.Linear(dimension, 4 * dimension), nn.GELU(), nn.Linear(4 * dimension, dimension)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        seen = self.before_attention(hidden)
        hidden = hidden + self.dropout(self.attention(seen, seen, causal=True))
        return hidden + self.dropout(self.feed_forward(self.before_feed_forward(hidden)))
