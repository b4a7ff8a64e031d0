"""The progress of parallel runs: plain lines, each with the name of its run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO, final

from apo_experiments.listeners import Listener
from apo_experiments.problem import Budget
from apo_experiments.progress import PlainProgress
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig

__all__ = ["CrowdProgress"]


@final
class CrowdProgress:
    """Gives every run its own lines.

    Args:
        runs: How many runs there will be.
        metrics: The metric to print at the end of a run, by recipe.
        stream: Where to write; standard error by default.
        every_seconds: How often a run may have a line.

    Example:
        >>> config = RunConfig("rosenbrock", "SGD", "sgd", "smoke", seed=0, epochs=2)
        >>> with CrowdProgress(2, {}, sys.stdout) as shown:
        ...     first, second = shown.listener(config), shown.listener(config)
        ...     second.started(config, Budget(20, 10))
        ...     first.message("resuming from step 10 of 20")
        [2/2] rosenbrock SGD seed 0: started, 2 epochs of 10 steps
        [1/2] rosenbrock SGD seed 0: resuming from step 10 of 20
    """

    def __init__(
        self, runs: int, metrics: Mapping[str, str], stream: TextIO | None = None, every_seconds: float = 30.0
    ) -> None:
        self.runs, self.metrics, self.every_seconds = runs, metrics, every_seconds
        self.stream: TextIO = sys.stderr if stream is None else stream
        self._begun = 0

    def __enter__(self) -> CrowdProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):
            self.stream.flush()

    def listener(self, config: RunConfig) -> Listener:
        """Return the listener of a run that is about to start."""
        self._begun += 1
        lines = PlainProgress(self.runs, self.metrics, self.stream, self.every_seconds, self._begun)
        return _OneOfMany(lines, f"[{self._begun}/{self.runs}] {config.recipe} {config.label} seed {config.seed}")

    def message(self, text: str) -> None:
        """Print something about all runs."""
        with suppress(OSError):  # the runs continue even if the output is closed
            print(text, file=self.stream, flush=True)


@final
class _OneOfMany:
    """Plain lines whose messages have the name of the run too."""

    def __init__(self, lines: PlainProgress, title: str) -> None:
        self._lines, self._title = lines, title

    def started(self, config: RunConfig, budget: Budget) -> None:
        self._lines.started(config, budget)

    def row(self, row: Mapping[str, Any]) -> None:
        self._lines.row(row)

    def finished(self, record: Record) -> None:
        self._lines.finished(record)

    def message(self, text: str) -> None:
        self._lines.message(f"{self._title}: {text}")
