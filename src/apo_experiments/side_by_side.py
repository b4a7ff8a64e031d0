"""Parallel runs on one machine, each in its own process: small ones share a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, final

from apo_experiments import processes
from apo_experiments.execution import Assignment, Failure, Outcome, outcome
from apo_experiments.interruption import Interruption, TimeIsUp, interruptible
from apo_experiments.listeners import Listener
from apo_experiments.problem import Budget
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig
from apo_experiments.train import finished

__all__ = ["side_by_side"]

#: Gives every run its own listener: rows of several runs would be mixed up.
Listeners = Callable[[RunConfig], Listener]


def side_by_side(
    configs: Sequence[RunConfig], jobs: int, assignment: Assignment, listeners: Listeners, left_out: set[str]
) -> Iterator[Outcome]:
    """Train several runs at a time, and return each when it ends.

    A process that is killed affects only its own run; the same call resumes it from its checkpoint.

    Args:
        configs: The runs, in the order in which they begin.
        jobs: How many there are at a time.
        assignment: Their common settings.
        listeners: Gives each of them a listener.
        left_out: Names of recipes of which no further run begins; the caller may add to it between two outcomes.

    Yields:
        Each run with its finished record, or with the reason why there is none.

    Raises:
        KeyboardInterrupt: It was interrupted, or time is up; all runs have stopped, with a checkpoint each.
    """
    waiting = list(reversed(configs))
    with interruptible(assignment.deadline) as interruption:
        crew = _Crew(jobs, assignment, interruption)
        try:
            while crew.running or (waiting and not interruption.due):
                if waiting and len(crew.running) < jobs and not interruption.due:
                    config = waiting.pop()
                    if config.recipe in left_out:
                        continue
                    record = finished(config.directory(assignment.root))
                    if record is None:
                        crew.begin(config, listeners(config))
                    else:  # not worth a process
                        listeners(config).finished(record)
                        yield config, record
                else:
                    yield from crew.ended()
        finally:
            crew.dismiss()
        if waiting or crew.incomplete:
            interruption.obey()


@dataclass
class _Member:
    """A process at work on a run."""

    config: RunConfig
    process: BaseProcess
    listener: Listener
    result: Record | Failure | None = None


@final
class _Crew:
    """The processes at work."""

    def __init__(self, jobs: int, assignment: Assignment, interruption: Interruption) -> None:
        self.jobs, self.assignment, self.interruption = jobs, assignment, interruption
        self.running: dict[Connection, _Member] = {}
        self.incomplete = False  # whether a run stopped cleanly before its end
        self._asked = False

    def begin(self, config: RunConfig, listener: Listener) -> None:
        """Start a process for a run."""
        connection, process = processes.start(_carry_out, (self.assignment, config), self.jobs, "apo run")
        self.running[connection] = _Member(config, process, listener)

    def ended(self) -> Iterator[Outcome]:
        """Forward messages of the processes for a while, and return the runs that have ended."""
        for connection in wait(list(self.running), timeout=0.5):
            assert isinstance(connection, Connection)
            member = self.running[connection]
            if _hear(connection, member):
                continue
            member.process.join()
            del self.running[connection]
            result = self._result(member)
            if result is not None:
                yield member.config, result
        if self.interruption.requested and not self._asked:
            processes.ask_to_stop(member.process for member in self.running.values())
            self._asked = True

    def dismiss(self) -> None:
        """Wait until all remaining processes have stopped, for instance after a second Ctrl-C."""
        members = list(self.running.values())
        processes.ask_to_stop(member.process for member in members)
        for member in members:
            member.process.join()

    def _result(self, member: _Member) -> Record | Failure | None:
        code = member.process.exitcode
        if member.result is not None:
            return member.result
        if code == processes.TIME_IS_UP or (code == processes.INTERRUPTED and self.interruption.requested):
            self.incomplete = True
            return None
        return Failure(f"its process died (exit code {code}); run the same command to resume from its last checkpoint")


def _hear(connection: Connection, member: _Member) -> bool:
    """Forward one message of a process, and return False once it has ended."""
    try:
        kind, content = connection.recv()
    except (EOFError, OSError):
        return False
    if kind == "result":
        member.result = content
    else:
        getattr(member.listener, kind)(*content)
    return True


def _carry_out(assignment: Assignment, config: RunConfig, connection: Connection) -> None:
    """Run as one of the processes."""
    processes.become_worker()
    try:
        result = outcome(assignment, config, _Relay(connection))
    except TimeIsUp:
        raise SystemExit(processes.TIME_IS_UP) from None
    except KeyboardInterrupt:
        raise SystemExit(processes.INTERRUPTED) from None
    with suppress(OSError):
        connection.send(("result", result))


@final
class _Relay:
    """A listener that forwards to the parent process; if that is gone, this one soon will be."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def started(self, config: RunConfig, budget: Budget) -> None:
        self._send("started", config, budget)

    def row(self, row: Mapping[str, Any]) -> None:
        self._send("row", dict(row))

    def finished(self, record: Record) -> None:
        self._send("finished", record)

    def message(self, text: str) -> None:
        self._send("message", text)

    def _send(self, kind: str, *content: Any) -> None:
        with suppress(OSError):
            self._connection.send((kind, content))
