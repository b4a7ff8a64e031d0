"""Worker processes on this machine: how they start, stop on request, and end with their parent.

Processes, not threads, since torch's random number generators belong to the process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["INTERRUPTED", "TIME_IS_UP", "ask_to_stop", "become_worker", "few_threads", "start"]

#: Exit codes of workers that stopped in an orderly way before their work was done.
INTERRUPTED, TIME_IS_UP = 130, 3


def start(
    target: Callable[..., None], arguments: Iterable[Any], jobs: int, name: str
) -> tuple[Connection, BaseProcess]:
    """Start a worker.

    Args:
        target: A function of a module, which is called with ``arguments`` and the worker's end of a pipe; it calls
            :func:`become_worker` first.
        arguments: Plain data.
        jobs: How many workers share the cores.
        name: What the process is called.

    Returns:
        Our end of the pipe, which ends with the process, and the process.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, sender), name=name)
    with _ctrl_c_ignored(), few_threads(jobs):
        process.start()
    sender.close()  # so that the pipe ends with the process
    return receiver, process


def ask_to_stop(processes: Iterable[BaseProcess]) -> None:
    """Ask workers to stop; training does so after the current step."""
    for process in processes:
        process.terminate()


def become_worker() -> None:
    """Make this process stop cleanly on request, or when its parent is gone."""
    # While a run trains, the loop waits for the end of a step; everything else can stop at once.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


@contextmanager
def few_threads(jobs: int) -> Iterator[None]:
    """Make processes that are started here share the cores, unless the user has set the number of threads.

    It is an environment variable, because torch and its libraries read it when they are imported.

    Example:
        >>> with few_threads(10_000):
        ...     "OMP_NUM_THREADS" in os.environ
        True
    """
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Make processes that are started here ignore Ctrl-C, which a terminal sends to all: the parent forwards it.

    A worker that got both would treat the second one as a request to stop without a checkpoint.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
