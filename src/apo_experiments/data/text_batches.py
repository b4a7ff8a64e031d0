"""Batches of sentence pairs for translation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from apo_experiments.data.epochs import EpochBatches

#: Source and target of one pair, as pieces of a vocabulary.
Pieces = tuple[Sequence[int], Sequence[int]]
#: ``(source, target_in), target_out``.
TextBatch = tuple[tuple[Tensor, Tensor], Tensor]


@final
class TextBatches(EpochBatches):
    """Pairs of sentences in batches of about equal length, for a translation model with teacher forcing.

    Sentences are sorted by length, split into batches of at most ``max_tokens`` (including padding; the longer side
    counts) and padded, once. Each epoch returns these batches in a new order.

    Args:
        pairs: Source and target pieces, without beginning and end.
        max_tokens: Of one side of a batch. A pair that is longer is left out and counted in ``skipped``.
        seed: Decides the order of the batches.
        device: Where they go, once.
        pad: Piece that fills short sentences.
        bos: Piece that begins a target.
        eos: Piece that ends both sides.
    """

    def __init__(
        self,
        pairs: Sequence[Pieces],
        max_tokens: int,
        seed: int,
        device: torch.device | str = "cpu",
        pad: int = 0,
        bos: int = 1,
        eos: int = 2,
    ) -> None:
        kept = [pair for pair in pairs if _padded_length(pair) <= max_tokens]
        #: How many pairs were left out because they are too long.
        self.skipped = len(pairs) - len(kept)
        if not kept:
            raise ValueError(f"max_tokens must be enough for one of the {len(pairs)} pairs, got {max_tokens}")
        groups = _bucketed(kept, max_tokens)
        # The order of the batches is drawn on the CPU: the host needs the numbers to pick the tensors.
        super().__init__(len(groups), seed, "cpu")
        self._batches = [_padded(group, device, pad, bos, eos) for group in groups]
        self._order: list[int] = []

    def start_epoch(self, generator: torch.Generator) -> None:
        """Draw the order of the batches of the next epoch."""
        self._order = torch.randperm(len(self._batches), generator=generator).tolist()

    def batch(self, position: int) -> TextBatch:
        """Return one batch: ``(source [B, S], target_in [B, T])`` and ``target_out [B, T]``."""
        return self._batches[self._order[position]]

    def in_order(self) -> list[TextBatch]:
        """Return all batches, short sentences first, for evaluation."""
        return list(self._batches)


def _padded_length(pair: Pieces) -> int:
    return max(len(pair[0]), len(pair[1])) + 1


def _bucketed(pairs: Sequence[Pieces], max_tokens: int) -> list[list[Pieces]]:
    """Sort by length and split into batches of at most ``max_tokens``."""
    groups: list[list[Pieces]] = []
    for pair in sorted(pairs, key=lambda pair: (_padded_length(pair), len(pair[0]))):
        # Sorted, so the new pair is the longest of its batch.
        if groups and (len(groups[-1]) + 1) * _padded_length(pair) <= max_tokens:
            groups[-1].append(pair)
        else:
            groups.append([pair])
    return groups


def _padded(group: Sequence[Pieces], device: torch.device | str, pad: int, bos: int, eos: int) -> TextBatch:
    source = _matrix([[*source, eos] for source, _ in group], pad)
    target_in = _matrix([[bos, *target] for _, target in group], pad)
    target_out = _matrix([[*target, eos] for _, target in group], pad)
    return (source.to(device), target_in.to(device)), target_out.to(device)


def _matrix(rows: Sequence[Sequence[int]], pad: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], dtype=torch.int64)
