"""Python programs that tests start, signal and kill, each in a process of its own that need not import torch first.

A fresh interpreter takes longer to import torch than most of these programs run. They are forked instead, from a
server of :mod:`multiprocessing` that has imported the large packages and nothing of this project.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO
from unittest import mock

ROOT = Path(__file__).parents[1]
#: Of a program and of the processes that it spawns. One thread: a fork copies no other.
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}

#: The second is what torch imports when its first optimizer is made.
_LARGE = ["torch", "torch._dynamo", "optuna", "rich.console"]
_CONTEXT = multiprocessing.get_context("forkserver")


class Program:
    """``python -m module words``, with the methods of :class:`subprocess.Popen` that the tests use."""

    def __init__(self, module: str, *words: object, environment: Mapping[str, str] | None = None) -> None:
        with mock.patch.dict(os.environ, ENVIRONMENT):
            _CONTEXT.set_forkserver_preload(_LARGE)
            forkserver.ensure_running()
        (out, out_of_it), (err, err_of_it) = _CONTEXT.Pipe(duplex=False), _CONTEXT.Pipe(duplex=False)
        variables = {**os.environ, **ENVIRONMENT, **(environment or {})}
        arguments = (module, [str(word) for word in words], variables, os.getcwd(), out_of_it, err_of_it)
        self._process = _CONTEXT.Process(target=_become, args=arguments)
        self._process.start()
        out_of_it.close()
        err_of_it.close()
        self.stdout, self.stderr = _reader(out), _reader(err)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self._process.is_alive():
            self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait until nobody can write to the program's output any more; return what was still to be read."""
        texts: dict[TextIO, str] = {}

        def read(stream: TextIO) -> None:
            with stream:
                texts[stream] = stream.read()

        threads = [threading.Thread(target=read, args=(s,), daemon=True) for s in (self.stdout, self.stderr)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                self.kill()
                raise TimeoutError(f"process {self.pid} has not ended within {timeout} seconds")
        self._process.join()
        return texts[self.stdout], texts[self.stderr]


def _reader(connection: Connection) -> TextIO:
    stream = os.fdopen(os.dup(connection.fileno()), encoding="utf-8")
    connection.close()
    return stream


def _become(
    module: str, words: list[str], environment: dict[str, str], folder: str, out: Connection, err: Connection
) -> None:
    """Run the program in this process, which has just been forked, as ``python -m`` would."""
    for stream, descriptor in ((out, 1), (err, 2)):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server ignores
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
