"""Runs one after the other: their common settings, and their outcomes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apo_experiments.errors import UserError
from apo_experiments.listeners import Listener
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig
from apo_experiments.train import train

__all__ = ["Assignment", "Failure", "Outcome", "in_turn", "outcome"]


@dataclass(frozen=True)
class Assignment:
    """The common settings of all runs of a command: plain data, so that it can be sent to another process.

    Attributes:
        root: The folder of all runs.
        data_dir: The folder of the data sets.
        deadline: When to stop, as a value of ``time.time()``.
        chosen_by: How hyperparameters were chosen, by recipe and label, for the records.

    Example:
        >>> Assignment(Path("runs")).deadline is None
        True
    """

    root: Path
    data_dir: Path | None = None
    deadline: float | None = None
    chosen_by: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)

    def train(self, config: RunConfig, listener: Listener) -> Record:
        """Train one run to its end; see :func:`apo_experiments.train.train`."""
        return train(
            config,
            root=self.root,
            data_dir=self.data_dir,
            listener=listener,
            deadline=self.deadline,
            chosen_by=self.chosen_by.get((config.recipe, config.label)),
        )


@dataclass(frozen=True)
class Failure:
    """Why a run did not finish.

    Attributes:
        reason: For users, without a full stop unless it is a separate sentence.
        details: The traceback, for ``--debug``.
        fixable: Whether the user can fix it; then the other runs of the recipe would fail in the same way.

    Example:
        >>> Failure("RuntimeError: out of luck").fixable
        False
    """

    reason: str
    details: str = ""
    fixable: bool = False


#: A run with its finished record, or with the reason why there is none.
Outcome = tuple[RunConfig, Record | Failure]


def in_turn(
    configs: Sequence[RunConfig], assignment: Assignment, listener: Listener, left_out: set[str]
) -> Iterator[Outcome]:
    """Train runs one after the other, in this process.

    Args:
        configs: The runs.
        assignment: Their common settings.
        listener: Receives their progress.
        left_out: Names of recipes that are not to be run; the caller may add to it between two outcomes.

    Yields:
        Each run with its finished record, or with the reason why there is none.

    Raises:
        KeyboardInterrupt: It was interrupted, or time is up; the same call resumes it.
    """
    for config in configs:
        if config.recipe not in left_out:
            yield config, outcome(assignment, config, listener)


def outcome(assignment: Assignment, config: RunConfig, listener: Listener) -> Record | Failure:
    """Train one run and return its record, or why it failed.

    Raises:
        KeyboardInterrupt: It was interrupted, or time is up.
    """
    try:
        return assignment.train(config, listener)
    except UserError as error:
        return Failure(str(error), traceback.format_exc(), fixable=True)
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
