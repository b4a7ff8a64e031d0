"""Several workers of a sweep on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, final

from apo_experiments import processes as workers
from apo_experiments.errors import UserError
from apo_experiments.interruption import Interruption, TimeIsUp, interruptible
from apo_experiments.listeners import Listener
from apo_experiments.problem import Budget
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig
from apo_experiments.sweep.worker import Order, ledgers, work

__all__ = ["work_in_processes"]


def work_in_processes(order: Order, jobs: int, listener: Listener) -> None:
    """Process an order with several workers.

    Args:
        order: The order.
        jobs: How many processes.
        listener: Is told about each run when it ends, because rows of several runs would be mixed up.

    Raises:
        UserError: A worker met something that the user can fix, or all of them died.
        KeyboardInterrupt: It was interrupted, or time is up; the same order resumes it.
    """
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    with interruptible() as interruption:
        try:
            for _ in range(jobs):
                connection, process = workers.start(_worker_process, (order,), jobs, "apo sweep worker")
                connections.append(connection)
                processes.append(process)
            errors = _follow(connections, processes, listener, interruption)
        except BaseException:  # for example a second Ctrl-C, which does not wait for the current step
            workers.ask_to_stop(processes)
            raise
        finally:
            for process in processes:
                process.join()
    if errors:
        raise UserError(errors[0])
    if interruption.requested:
        raise KeyboardInterrupt
    codes = [process.exitcode for process in processes]
    if workers.TIME_IS_UP in codes:
        raise TimeIsUp
    if all(codes):
        raise UserError(
            f"all {jobs} worker processes have died (exit codes {', '.join(map(str, codes))}): run the same "
            "command to resume, with fewer --jobs if memory was short."
        )


def _follow(
    connections: list[Connection], processes: list[BaseProcess], listener: Listener, interruption: Interruption
) -> list[str]:
    """Forward messages of the workers until all have ended, and return what the user has to fix."""
    errors: list[str] = []
    asked = False
    while connections:
        for connection in wait(connections, timeout=0.5):
            assert isinstance(connection, Connection)
            if not _hear(connection, listener, errors):
                connections.remove(connection)
        if (interruption.requested or errors) and not asked:
            workers.ask_to_stop(processes)
            asked = True
    return errors


def _hear(connection: Connection, listener: Listener, errors: list[str]) -> bool:
    """Forward one message of a worker, and return False once it has ended."""
    try:
        kind, content = connection.recv()
    except (EOFError, OSError):
        return False
    if kind == "error":
        errors.append(content)
    elif kind == "message":
        listener.message(content)
    else:
        config, budget, record = content
        if budget is not None:
            listener.started(config, budget)
        listener.finished(record)
    return True


def _worker_process(order: Order, connection: Connection) -> None:
    """Run as one of the processes."""
    from apo_experiments.recipes import RECIPES

    workers.become_worker()
    try:
        work(order, ledgers(order, RECIPES[order.recipe]), _Relay(connection))
    except UserError as error:
        with suppress(OSError):
            connection.send(("error", str(error)))
        raise SystemExit(2) from None
    except TimeIsUp:
        raise SystemExit(workers.TIME_IS_UP) from None
    except KeyboardInterrupt:
        raise SystemExit(workers.INTERRUPTED) from None


@final
class _Relay:
    """A listener that forwards to the parent process."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._begun: Budget | None = None

    def started(self, config: RunConfig, budget: Budget) -> None:
        self._begun = budget

    def row(self, row: Mapping[str, Any]) -> None:
        pass

    def finished(self, record: Record) -> None:
        self._send("finished", (record.config, self._begun, record))
        self._begun = None

    def message(self, text: str) -> None:
        self._send("message", text)

    def _send(self, kind: str, content: Any) -> None:
        with suppress(OSError):  # the parent is gone, and this process soon will be
            self.connection.send((kind, content))
