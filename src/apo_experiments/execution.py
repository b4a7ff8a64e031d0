"""Runs one after the other, or several at a time, each in its own process: small ones share a GPU."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apo_experiments.errors import UserError
from apo_experiments.interruption import interruptible
from apo_experiments.processes import Crew
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig
from apo_experiments.train import Listener, finished, train


@dataclass(frozen=True)
class Assignment:
    """The common settings of all runs of a command: plain data, so that it can be sent to another process."""

    root: Path
    data_dir: Path | None = None
    deadline: float | None = None
    #: How hyperparameters were chosen, by recipe and label, for the records.
    chosen_by: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why a run did not finish.

    Attributes:
        reason: For users, without a full stop unless it is a separate sentence.
        details: The traceback, for ``--debug``.
        fixable: Whether the user can fix it; then the other runs of the recipe would fail in the same way.
    """

    reason: str
    details: str = ""
    fixable: bool = False


#: A run with its finished record, or with the reason why there is none.
Outcome = tuple[RunConfig, Record | Failure]


def carried_out(
    configs: Sequence[RunConfig],
    jobs: int,
    assignment: Assignment,
    lanes: Callable[[], Listener],
    left_out: set[str],
) -> Iterator[Outcome]:
    """Train runs, in this process or several at a time, each in its own, and return each when it ends.

    A process that is killed affects only its own run; the same call resumes it from its checkpoint.

    Args:
        configs: The runs, in the order in which they begin.
        jobs: How many there are at a time.
        assignment: Their common settings.
        lanes: Gives those that follow each other, or each of several, a listener.
        left_out: Names of recipes of which no further run begins; the caller may add to it between two outcomes.

    Yields:
        Each run with its finished record, or with the reason why there is none.

    Raises:
        KeyboardInterrupt: It was interrupted, or time is up; all runs have stopped, with a checkpoint each.
    """
    if jobs == 1:
        lane = lanes()
        yield from ((config, _outcome(assignment, config, lane)) for config in configs if config.recipe not in left_out)
        return
    waiting, incomplete = list(reversed(configs)), False
    with interruptible(assignment.deadline) as interruption, Crew(jobs, "apo run") as crew:
        while crew.members or (waiting and not interruption.due):
            if waiting and len(crew.members) < jobs and not interruption.due:
                config = waiting.pop()
                if config.recipe in left_out:
                    continue
                record = finished(config.directory(assignment.root))
                if record is None:
                    crew.begin(_outcome, (assignment, config), lanes(), config)
                else:  # not worth a process
                    lanes().finished(record)
                    yield config, record
                continue
            for member in crew.ended():
                if member.result is not None:
                    yield member.about, member.result
                elif member.stopped and interruption.due:
                    incomplete = True
                else:
                    died = f"its process died (exit code {member.process.exitcode})"
                    yield member.about, Failure(f"{died}; run the same command to resume from its last checkpoint")
            if interruption.requested:
                crew.ask_to_stop()
    if waiting or incomplete:
        interruption.obey()


def _outcome(assignment: Assignment, config: RunConfig, listener: Listener) -> Record | Failure:
    """Train one run and return its record, or why it failed."""
    try:
        return train(
            config,
            root=assignment.root,
            data_dir=assignment.data_dir,
            listener=listener,
            deadline=assignment.deadline,
            chosen_by=assignment.chosen_by.get((config.recipe, config.label)),
        )
    except UserError as error:
        return Failure(str(error), traceback.format_exc(), fixable=True)
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
