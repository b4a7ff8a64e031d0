"""Endless streams of batches on the training device.

The data are moved to the device once. Everything random in an epoch - the order, crops and flips - is drawn when it
starts, so a batch is a slice, nothing waits for the host, and the state of a stream is small: the state of the random
number generator at the start of the epoch, and the number of batches since then.

Images and tables drop the incomplete last batch of an epoch (``drop_last``); the order changes in each epoch, so no
example is left out for long.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from apo_experiments.data.augment import PADDING, Normalization, crop_and_flip
from apo_experiments.data.vocabulary import BOS, EOS, PAD
from apo_experiments.problem import Batches

#: Source and target of one pair, as pieces of a vocabulary.
Pieces = tuple[Sequence[int], Sequence[int]]
#: ``(source, target_in), target_out``, the last of them one long row.
TextBatch = tuple[tuple[Tensor, Tensor], Tensor]

# Images that are shuffled and cropped at a time, to limit the memory of the padded copies.
_CHUNK = 8192


class EpochBatches(Batches):
    """A stream whose randomness is drawn at the beginning of each epoch."""

    def __init__(self, steps_per_epoch: int, seed: int, device: torch.device | str) -> None:
        self.steps_per_epoch = steps_per_epoch
        self._generator = torch.Generator(device).manual_seed(seed)
        self._epoch_start = self._generator.get_state()
        self._position = steps_per_epoch  # the first epoch begins with the first batch

    @abstractmethod
    def start_epoch(self, generator: torch.Generator) -> None:
        """Draw everything random in the next epoch."""

    @abstractmethod
    def batch(self, position: int) -> tuple[Any, Any]:
        """Return one batch of the epoch that has begun."""

    def next(self) -> tuple[Any, Any]:
        """Return the next batch, of the next epoch if this one is over."""
        if self._position == self.steps_per_epoch:
            self._epoch_start = self._generator.get_state()
            self.start_epoch(self._generator)
            self._position = 0
        self._position += 1
        return self.batch(self._position - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, and the generator as it was when the epoch began (if over: as it is)."""
        over = self._position == self.steps_per_epoch
        generator = self._generator.get_state() if over else self._epoch_start.clone()
        return {"generator": generator, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the same epoch again and continue with the batch that would have been next."""
        position = int(state["position"])
        if not 0 <= position <= self.steps_per_epoch:
            raise ValueError(
                f"state must be from the same stream, got position {position} of {self.steps_per_epoch} batches"
            )
        self._position = position
        # The state of a generator is on the CPU, even for a GPU.
        self._epoch_start = state["generator"].clone().cpu()
        if self._epoch_start.shape != self._generator.get_state().shape:
            # From another kind of device, so that it only decides which state this generator gets.
            digest = hashlib.sha256(bytes(self._epoch_start.tolist())).digest()
            self._epoch_start = self._generator.manual_seed(int.from_bytes(digest[:7], "big")).get_state()
        self._generator.set_state(self._epoch_start)
        if position < self.steps_per_epoch:
            self.start_epoch(self._generator)


@final
class ImageBatches(EpochBatches):
    """Shuffled, augmented and normalized images with their labels.

    Args:
        images: ``[N, C, H, W]``, uint8.
        labels: ``[N]`` (or any targets with N rows).
        batch_size: Images in a batch; what is left of an epoch is left out.
        seed: Decides order, crops and flips.
        device: Where they go, once.
        normalize: Applied to the images of a batch.
        augment: Whether to crop (4 pixels of black padding) and flip (every other image), both at random.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        batch_size: int,
        seed: int,
        device: torch.device | str = "cpu",
        normalize: Normalization | None = None,
        augment: bool = False,
    ) -> None:
        super().__init__(_steps(len(images), len(labels), batch_size), seed, device)
        if images.dtype != torch.uint8:
            raise TypeError(f"images must be torch.uint8, as loaded, got {images.dtype}")
        self._images, self._labels = images.to(device), labels.to(device)
        self._batch_size, self._augment = batch_size, augment
        self._normalize = normalize or Normalization(device=device)
        # Overwritten by each epoch.
        self._epoch_images, self._epoch_labels = torch.empty_like(self._images), torch.empty_like(self._labels)

    def start_epoch(self, generator: torch.Generator) -> None:
        """Shuffle, crop and flip all images of the next epoch."""
        count, device = len(self._images), self._images.device
        order = torch.randperm(count, generator=generator, device=device)
        torch.index_select(self._labels, 0, order, out=self._epoch_labels)
        if not self._augment:
            torch.index_select(self._images, 0, order, out=self._epoch_images)
            return
        offsets = torch.randint(0, 2 * PADDING + 1, (count, 2), generator=generator, device=device)
        flips = torch.rand(count, generator=generator, device=device) < 0.5
        for start in range(0, count, _CHUNK):
            part = slice(start, start + _CHUNK)
            chosen = self._images.index_select(0, order[part])
            self._epoch_images[part] = crop_and_flip(chosen, offsets[part], flips[part])

    def batch(self, position: int) -> tuple[Tensor, Tensor]:
        """Return one batch: images ``[B, C, H, W]`` and labels ``[B]``."""
        part = slice(position * self._batch_size, (position + 1) * self._batch_size)
        # A copy of the labels: the next epoch overwrites these, and APO evaluates the last batch again.
        return self._normalize(self._epoch_images[part]), self._epoch_labels[part].clone()


@final
class TableBatches(EpochBatches):
    """Shuffled rows of inputs and targets.

    Args:
        inputs: ``[N, ...]``, numbers.
        targets: ``[N, ...]``; may be the inputs themselves, for an autoencoder.
        batch_size: Rows in a batch; what is left of an epoch is left out.
        seed: Decides the order.
        device: Where they go, once.
    """

    def __init__(
        self, inputs: Tensor, targets: Tensor, batch_size: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(_steps(len(inputs), len(targets), batch_size), seed, device)
        self._inputs = inputs.to(device)
        self._targets = self._inputs if targets is inputs else targets.to(device)
        self._batch_size = batch_size
        self._order = torch.empty(0, dtype=torch.int64, device=device)

    def start_epoch(self, generator: torch.Generator) -> None:
        """Draw the order of the next epoch."""
        self._order = torch.randperm(len(self._inputs), generator=generator, device=self._inputs.device)

    def batch(self, position: int) -> tuple[Tensor, Tensor]:
        """Return one batch: inputs ``[B, ...]`` and targets ``[B, ...]``."""
        rows = self._order[position * self._batch_size : (position + 1) * self._batch_size]
        inputs = self._inputs.index_select(0, rows)
        if self._targets is self._inputs:
            return inputs, inputs
        return inputs, self._targets.index_select(0, rows)


def _steps(inputs: int, targets: int, batch_size: int) -> int:
    if inputs != targets:
        raise ValueError(f"inputs and targets must have the same length, got {inputs} and {targets}")
    if not 0 < batch_size <= inputs:
        raise ValueError(f"batch_size must be from 1 to {inputs}, the size of the data, got {batch_size}")
    return inputs // batch_size


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


@final
class TextBatches(EpochBatches):
    """Pairs of sentences in batches of about equal length, for a translation model with teacher forcing.

    Sentences are sorted by length, split into batches of at most ``max_tokens`` (including padding; the longer side
    counts) and padded, once. Each epoch returns these batches in a new order.

    Args:
        pairs: Source and target pieces, without beginning and end.
        max_tokens: Of one side of a batch. A pair that is longer is left out.
        seed: Decides the order of the batches.
        device: Where they go, once.
    """

    def __init__(self, pairs: Sequence[Pieces], max_tokens: int, seed: int, device: torch.device | str = "cpu") -> None:
        kept = [pair for pair in pairs if _padded_length(pair) <= max_tokens]
        if not kept:
            raise ValueError(f"max_tokens must be enough for one of the {len(pairs)} pairs, got {max_tokens}")
        groups = _bucketed(kept, max_tokens)
        # The order of the batches is drawn on the CPU: the host needs the numbers to pick the tensors.
        super().__init__(len(groups), seed, "cpu")
        self._batches: list[TextBatch] = []
        for group in groups:
            source, before, after = (
                padded(rows).to(device)
                for rows in (
                    [[*source, EOS] for source, _ in group],
                    [[BOS, *target] for _, target in group],
                    [[*target, EOS] for _, target in group],
                )
            )
            self._batches.append(((source, before), after.flatten()))
        self._order: list[int] = []

    def start_epoch(self, generator: torch.Generator) -> None:
        """Draw the order of the batches of the next epoch."""
        self._order = torch.randperm(len(self._batches), generator=generator).tolist()

    def batch(self, position: int) -> TextBatch:
        """Return one batch: ``(source [B, S], target_in [B, T])`` and ``target_out [B * T]``, padding included."""
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


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return sentences as a matrix, short ones filled at the end."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows], dtype=torch.int64)
