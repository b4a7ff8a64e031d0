"""Listeners receive the progress of runs: the command line's display, or a process that passes it on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apo_experiments.problem import Budget
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig


class Listener:
    """Receives the progress of a run, and ignores what a subclass does not want."""

    def started(self, config: RunConfig, budget: Budget) -> None:
        """A run starts or resumes; one that was finished before is only reported as ``finished``."""

    def row(self, row: Mapping[str, Any]) -> None:
        """An epoch is over; if it is not, the row covers its steps so far and has no metrics."""

    def finished(self, record: Record) -> None:
        """The run has finished."""

    def message(self, text: str) -> None:
        """A message for the user."""
