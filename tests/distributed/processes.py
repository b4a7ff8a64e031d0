"""Run a function in several gloo processes on this machine and bring back what each returned.

The processes stay: starting one and importing torch takes longer than most of what is tested in it. Every call has a
process group of its own; after a failure all processes are started again.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
import torch.multiprocessing as multiprocessing

TIMEOUT = 120  # seconds for a call; a collective operation that nobody joins gives up after half of it

_CALLS = itertools.count()


class _OneThread(dist.ProcessGroupGloo):
    """Gloo with one thread instead of two: with both at work, torch 2.13 at times corrupts its memory."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
        options._timeout, options._threads = timeout, 1
        super().__init__(store, rank, size, options)


class _Worker:
    """A process that runs what it is sent."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, other_end = context.Pipe()
        # A daemon: it ends with the tests.
        self.process = context.Process(target=_serve, args=(other_end,), daemon=True)
        self.process.start()
        other_end.close()

    def answer(self) -> str | None:
        """Return what went wrong in the process; None if all went well."""
        if self.line.poll(TIMEOUT):
            try:
                return self.line.recv()
            except EOFError:
                self.process.join()
                return f"it died with exit code {self.process.exitcode}"
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(1)  # to print where it is
        return "no answer; the captured stderr says where it is"


_WORKERS: list[_Worker] = []


def _serve(line: Connection) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    distributed_c10d.ProcessGroupGloo = _OneThread
    torch.set_num_threads(1)
    warnings.simplefilter("error", category=RuntimeWarning)
    while True:
        try:
            _run(*line.recv())
            line.send(None)
        except EOFError:
            return
        except BaseException:
            line.send(traceback.format_exc())


def _run(rank: int, size: int, folder: str, call: int, function: Callable[..., Any], args: tuple) -> None:
    torch.manual_seed(0)  # as a new process would start
    meeting = f"file://{folder}/rendezvous-{call}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT / 2)
    )
    try:
        torch.save(function(*args), f"{folder}/result-{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def in_processes(size: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of ``function(*args)`` in ``size`` processes that know each other, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    _WORKERS.extend(_Worker() for _ in range(size - len(_WORKERS)))
    workers, call = _WORKERS[:size], next(_CALLS)
    for rank, worker in enumerate(workers):
        worker.line.send((rank, size, str(folder), call, function, args))
    failures = [worker.answer() for worker in workers]
    if any(failures):
        _end_all()
        raise RuntimeError("\n".join(f"process {rank}: {text}" for rank, text in enumerate(failures) if text))
    return [torch.load(folder / f"result-{rank}.pt", weights_only=True) for rank in range(size)]


def _end_all() -> None:
    for worker in _WORKERS:
        worker.process.kill()
        worker.process.join()
    _WORKERS.clear()
