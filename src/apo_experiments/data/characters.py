"""Text as characters: the English side of a parallel corpus, and batches of windows of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from apo_experiments.data.streams import EpochBatches


def as_numbers(text: str, alphabet: Sequence[str]) -> Tensor:
    """Return the place of each character in an alphabet; what is not in it becomes its first character.

    Example:
        >>> as_numbers("abc?", " abc").tolist()
        [1, 2, 3, 0]
    """
    places = {character: place for place, character in enumerate(alphabet)}
    return torch.tensor([places.get(character, 0) for character in text])


def windows(text: Tensor, context: int, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Cut a text into windows of characters and of the characters that follow each of them.

    Example:
        >>> inputs, targets = windows(torch.arange(7), context=3)
        >>> inputs.tolist(), targets.tolist()
        ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    """
    count = (len(text) - 1 - offset) // context
    cut = slice(offset, offset + count * context)
    return text[cut].view(count, context), text[1:][cut].view(count, context)


@final
class WindowBatches(EpochBatches):
    """Windows of a text in a new order, and from a new first character, in each epoch; targets are one long row.

    Args:
        text: Characters as numbers, ``[N]``.
        context: Characters in a window.
        batch_size: Windows in a batch; what is left of an epoch is left out.
        seed: Decides first characters and orders.
        device: Where the text goes, once.

    Raises:
        ValueError: The text is too short for one batch.

    Example:
        >>> inputs, target = WindowBatches(torch.arange(100), context=5, batch_size=4, seed=0).next()
        >>> inputs.shape, bool((inputs.flatten() + 1 == target).all())
        (torch.Size([4, 5]), True)
    """

    def __init__(
        self, text: Tensor, context: int, batch_size: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        steps = (len(text) // context - 2) // batch_size  # at least so many windows for any first character
        if steps < 1:
            raise ValueError(f"batch_size must leave a batch of windows of {context} characters, got {batch_size}")
        # The first character is drawn on the CPU, since the host has to know it.
        super().__init__(steps, seed, "cpu")
        self._text, self._context, self._batch_size = text.to(device), context, batch_size
        self._inputs = self._targets = self._order = torch.empty(0, dtype=torch.int64, device=device)

    def start_epoch(self, generator: torch.Generator) -> None:
        """Draw the first character and the order of the next epoch."""
        offset = int(torch.randint(self._context, (), generator=generator))
        self._inputs, self._targets = windows(self._text, self._context, offset)
        self._order = torch.randperm(len(self._inputs), generator=generator).to(self._text.device)

    def batch(self, position: int) -> tuple[Tensor, Tensor]:
        """Return one batch: characters ``[B, context]`` and the next ones, ``[B * context]``."""
        rows = self._order[position * self._batch_size : (position + 1) * self._batch_size]
        return self._inputs.index_select(0, rows), self._targets.index_select(0, rows).flatten()
