"""Worker processes on this machine: how they start, report, stop on request, and end with their parent.

Processes, not threads, since torch's random number generators belong to the process. Not a pool of joblib or
``concurrent.futures``: if one of their processes is killed, all work of the pool is lost.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, final

from apo_experiments.interruption import TimeIsUp
from apo_experiments.train import Listener

#: Exit codes of workers that stopped in an orderly way before their work was done.
_INTERRUPTED, _TIME_IS_UP = 130, 3


@dataclass
class Member:
    """A process at work: what for, who listens to its reports, and what its function returned, if it did."""

    about: Any
    listener: Listener
    process: BaseProcess
    result: Any = None

    @property
    def stopped(self) -> bool:
        """Whether it was asked to stop, or its time was up, and it ended in an orderly way."""
        return self.process.exitcode in (_INTERRUPTED, _TIME_IS_UP)


@final
class Crew:
    """The processes at work; leaving the context stops them, which training does after the current step."""

    def __init__(self, jobs: int, name: str) -> None:
        self.jobs, self.name = jobs, name
        self.members: dict[Connection, Member] = {}
        self._asked = False

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exception: object) -> None:
        self._asked = False  # a second request, for instance after a second Ctrl-C, does not wait for the current step
        self.ask_to_stop()
        for member in self.members.values():
            member.process.join()

    def begin(self, work: Callable[..., Any], arguments: Sequence[Any], listener: Listener, about: Any = None) -> None:
        """Start a process that calls ``work``, a function of a module, with plain data and a listener."""
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_process, args=(work, arguments, sender), name=self.name)
        with _inherited(self.jobs):
            process.start()
        sender.close()  # so that the pipe ends with the process
        self.members[receiver] = Member(about, listener, process)

    def ended(self) -> list[Member]:
        """Forward reports of the processes for a while, and return those that have ended."""
        gone = []
        for connection in wait(list(self.members), timeout=0.5):
            assert isinstance(connection, Connection)
            member = self.members[connection]
            try:
                kind, content = connection.recv()
            except (EOFError, OSError):
                member.process.join()
                gone.append(self.members.pop(connection))
                continue
            if kind == "result":
                (member.result,) = content
            else:
                getattr(member.listener, kind)(*content)
        return gone

    def ask_to_stop(self) -> None:
        """Ask all processes to stop, once."""
        if not self._asked:
            for member in self.members.values():
                member.process.terminate()
        self._asked = True


@final
class _Relay:
    """A listener that forwards to the parent process; if that is gone, this one soon will be."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, kind: str) -> Callable[..., None]:
        def send(*content: Any) -> None:
            with suppress(OSError):
                self._connection.send((kind, content))

        return send


def _process(work: Callable[..., Any], arguments: Sequence[Any], connection: Connection) -> None:
    """Run as one of the processes, which stops cleanly on request, or when its parent is gone."""
    # While a run trains, the loop waits for the end of a step; everything else can stop at once.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
    relay: Any = _Relay(connection)
    try:
        relay.result(work(*arguments, relay))
    except TimeIsUp:
        raise SystemExit(_TIME_IS_UP) from None
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None


@contextmanager
def _inherited(jobs: int) -> Iterator[None]:
    """Set what processes that are started here inherit: their share of the cores, and that they ignore Ctrl-C.

    The threads are an environment variable, because torch and its libraries read it when they are imported; a number
    that the user has set is kept. A terminal sends Ctrl-C to all processes, and the parent forwards it: a worker that
    got both would treat the second one as a request to stop without a checkpoint.
    """
    own_threads = "OMP_NUM_THREADS" not in os.environ
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
    if own_threads:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    try:
        yield
    finally:
        if own_threads:
            del os.environ["OMP_NUM_THREADS"]
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
