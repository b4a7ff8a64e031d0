"""Several workers on one machine: processes, since torch's random streams belong to the process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, final

from apo_experiments.errors import UserError
from apo_experiments.interruption import Interruption, interruptible
from apo_experiments.listeners import Listener
from apo_experiments.problem import Budget
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig
from apo_experiments.sweep.worker import Order, ledgers, work

__all__ = ["work_in_processes"]


def work_in_processes(order: Order, jobs: int, listener: Listener) -> None:
    """Carry out an order with several workers.

    Args:
        order: The order.
        jobs: How many processes.
        listener: Hears of each run when it ends: rows of several runs at a time would be a jumble.

    Raises:
        UserError: A worker met something that the user can mend, or all of them died.
        KeyboardInterrupt: It was interrupted; the same order goes on.
    """
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    with interruptible() as interruption:
        try:
            for _ in range(jobs):
                connection, process = _start(order, jobs)
                connections.append(connection)
                processes.append(process)
            errors = _follow(connections, processes, listener, interruption)
        except BaseException:  # a second Ctrl-C, for one, does not wait for the step at hand
            _ask_to_stop(processes)
            raise
        finally:
            for process in processes:
                process.join()
    if errors:
        raise UserError(errors[0])
    if interruption.requested:
        raise KeyboardInterrupt
    codes = [process.exitcode for process in processes]
    if all(codes):
        raise UserError(
            f"all {jobs} worker processes have died (exit codes {', '.join(map(str, codes))}): the same command goes "
            "on; if memory was short, with fewer --jobs."
        )


def _follow(
    connections: list[Connection], processes: list[BaseProcess], listener: Listener, interruption: Interruption
) -> list[str]:
    """Pass on what the workers say until all have ended, and return what the user has to mend."""
    errors: list[str] = []
    asked = False
    while connections:
        for connection in wait(connections, timeout=0.5):
            assert isinstance(connection, Connection)
            if not _hear(connection, listener, errors):
                connections.remove(connection)
        if (interruption.requested or errors) and not asked:
            _ask_to_stop(processes)
            asked = True
    return errors


def _start(order: Order, jobs: int) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_worker_process, args=(order, jobs, sender), name="apo sweep worker")
    with _ctrl_c_ignored():
        process.start()
    sender.close()  # so that the pipe ends with the process
    return receiver, process


def _hear(connection: Connection, listener: Listener, errors: list[str]) -> bool:
    """Pass on what a worker says, and return False once it has ended."""
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


def _ask_to_stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.terminate()  # a wish, which training grants after the step at hand


def _worker_process(order: Order, jobs: int, connection: Connection) -> None:
    """Be one of the processes."""
    import torch

    from apo_experiments.recipes import RECIPES

    # While a run trains, the loop waits for the end of a step; everything else can be left at once.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _end_with_parent()
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    try:
        work(order, ledgers(order, RECIPES[order.recipe]), _Relay(connection))
    except UserError as error:
        with suppress(OSError):
            connection.send(("error", str(error)))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _end_with_parent() -> None:
    """Stop in an orderly way if the parent is killed, instead of training on unseen."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Let processes that are started here ignore Ctrl-C, which a terminal sends to all: the parent passes it on.

    A worker that got both would take the second one for impatience, and leave no checkpoint.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@final
class _Relay:
    """A listener that tells the parent process."""

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
