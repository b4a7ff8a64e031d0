"""What all streams of batches share: epochs, and resuming at a position."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from apo_experiments.problem import Batches


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
        self._epoch_start = self._own_state(state["generator"].clone().cpu())
        self._generator.set_state(self._epoch_start)
        if position < self.steps_per_epoch:
            self.start_epoch(self._generator)

    def _own_state(self, state: Tensor) -> Tensor:
        """Return a state for this generator; one from another kind of device only decides which."""
        if state.shape == self._generator.get_state().shape:
            return state
        digest = hashlib.sha256(bytes(state.tolist())).digest()
        return self._generator.manual_seed(int.from_bytes(digest[:7], "big")).get_state()
