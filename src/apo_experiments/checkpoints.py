"""The checkpoint of a run: one file, replaced atomically, with everything that an exact resume needs."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from apo_experiments.errors import UserError
from apo_experiments.files import remove, write_atomically

#: Saving takes at most one part in so many of the time.
_SHARE = 20


@final
class Checkpoint:
    """The file ``checkpoint.pt`` of one run, and when it is time to write it again."""

    def __init__(self, directory: Path, every_seconds: float = 60.0) -> None:
        self.path = directory / "checkpoint.pt"
        self.every_seconds = every_seconds
        self._next = time.monotonic() + every_seconds

    def due(self) -> bool:
        """Return whether it is time to save."""
        return time.monotonic() >= self._next

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint by ``state``, plain data and tensors."""
        began = time.monotonic()
        # Through memory: torch's own writer reports a full disk in many ways, a plain write in one.
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        write_atomically(self.path, buffer.getbuffer())
        now = time.monotonic()
        self._next = now + max(self.every_seconds, _SHARE * (now - began) if self.every_seconds else 0.0)

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """Return what was saved, or None if nothing was.

        Tensors saved on the CPU stay there (such as an optimizer's step counts); those from a GPU move to ``device``.
        """
        if not self.path.exists():
            return None
        elsewhere = {location: str(device) for location in ("cuda", "mps", *(f"cuda:{i}" for i in range(64)))}
        try:
            return torch.load(self.path, map_location=elsewhere, weights_only=True)
        except Exception as error:  # a damaged file fails in torch, zipfile or pickle, each in its own way
            raise UserError(
                f"{self.path} is damaged ({type(error).__name__}): delete it, and run the same command to start again."
            ) from error

    def remove(self) -> None:
        """Delete the file when the run no longer needs it."""
        remove(self.path)
