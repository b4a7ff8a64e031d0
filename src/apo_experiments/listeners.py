"""Whoever watches a run: the command line's display, a sweep, or nobody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, final

from apo_experiments.problem import Budget
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig

__all__ = ["Listener", "Silence"]


class Listener(Protocol):
    """Whoever wants to see how a run gets on.

    Example:
        >>> listener: Listener = Silence()
        >>> listener.message("nobody hears this")
    """

    def started(self, config: RunConfig, budget: Budget) -> None:
        """A run begins, or goes on; one that was finished before is only reported as ``finished``."""

    def row(self, row: Mapping[str, Any]) -> None:
        """An epoch is over; or it is not, and the row tells of its steps so far and has no metrics."""

    def finished(self, record: Record) -> None:
        """The run has come to its end."""

    def message(self, text: str) -> None:
        """Something worth a line."""


@final
class Silence:
    """A listener that says nothing.

    Example:
        >>> Silence().row({"step": 1})
    """

    def started(self, config: RunConfig, budget: Budget) -> None:
        """Say nothing."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Say nothing."""

    def finished(self, record: Record) -> None:
        """Say nothing."""

    def message(self, text: str) -> None:
        """Say nothing."""
