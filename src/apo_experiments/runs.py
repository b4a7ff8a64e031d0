"""What identifies a run, and where it lives on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from apo_experiments import renamed


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the result of one training run.

    Attributes:
        recipe: Name of the recipe.
        label: Label of its entry, which is also the name in tables and plots.
        method: Name of the method.
        scale: ``"smoke"``, ``"cpu"`` or ``"paper"``.
        seed: Seed of the initial weights, the order of the data and dropout.
        epochs: How long to train.
        hyper: The complete hyperparameters of the method.
        options: The complete options of the task.
        device: Where it runs; not part of the identity.
        compiled: Whether the network is compiled for training; not part of the identity, because it changes rounding
            alone.
    """

    recipe: str
    label: str
    method: str
    scale: str
    seed: int
    epochs: int
    hyper: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    compiled: bool = False

    @classmethod
    def from_record(cls, content: Mapping[str, Any]) -> RunConfig:
        """Build the config from a record; former names of hyperparameters become the current ones.

        Raises:
            TypeError: An attribute is missing or unknown.
        """
        config = cls(**content)
        return replace(config, hyper=renamed.of_today(config.hyper))

    def identity(self) -> str:
        """Return a short hash of everything that the result depends on: the same command finds its run again."""
        content = asdict(self)
        content["hyper"] = renamed.as_first_named(self.hyper)
        del content["device"], content["compiled"]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:10]

    def directory(self, root: Path) -> Path:
        """Return the folder of the run below ``root``."""
        return root / self.recipe / self.scale / self.label / f"seed{self.seed}-{self.identity()}"
