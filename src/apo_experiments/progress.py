"""The progress of runs: a live line on a terminal, plain lines in a log.

Both go to standard error, so that standard output has only the results.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, TextIO, final

from apo_experiments.listeners import Listener
from apo_experiments.problem import Budget
from apo_experiments.records import Record
from apo_experiments.results import figure_text, value
from apo_experiments.runs import RunConfig

__all__ = ["Display", "LiveProgress", "Pace", "PlainProgress", "display", "duration"]


class Display(Listener, AbstractContextManager["Display"], Protocol):
    """A listener that is closed when all runs have ended."""


def display(runs: int | None, metrics: Mapping[str, str], stream: TextIO | None = None) -> Display:
    """Return the display that suits where it is shown.

    Args:
        runs: How many runs there will be, if that is known.
        metrics: The metric to print at the end of a run, by recipe.
        stream: Where to write; standard error by default.

    Example:
        >>> import io
        >>> type(display(1, {}, io.StringIO())).__name__
        'PlainProgress'
    """
    target: TextIO = sys.stderr if stream is None else stream
    capable = target.isatty() and os.environ.get("TERM", "") != "dumb"
    if capable and importlib.util.find_spec("rich") is not None:
        return LiveProgress(runs, metrics, target)
    return PlainProgress(runs, metrics, target)


def duration(seconds: float) -> str:
    """Write a duration in two units at most.

    Example:
        >>> duration(5.2), duration(312), duration(7500), duration(200_000)
        ('5 s', '5 min 12 s', '2 h 5 min', '2 d 7 h')
    """
    rest = round(seconds)
    for unit, name, lower, lower_name in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if rest >= unit:
            return f"{rest // unit} {name} {rest % unit // lower} {lower_name}"
    return f"{rest} s"


@final
class Pace:
    """How fast a run is, and how long it will still take.

    The first two rows of this session give wall time, which includes evaluation; before that the training time
    of all sessions has to do.

    Args:
        budget: The length of the run.

    Example:
        >>> pace = Pace(Budget(steps=100, steps_per_epoch=10))
        >>> pace.left({"step": 20, "seconds": 2.0}, now=50.0), pace.left({"step": 30, "seconds": 3.0}, now=54.0)
        (8.0, 28.0)
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._first: tuple[int, float] | None = None

    def left(self, row: Mapping[str, Any], now: float | None = None) -> float:
        """Return the seconds that are left, estimated from the newest row."""
        now = time.monotonic() if now is None else now
        step = row["step"]
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            per_step = row.get("seconds", 0.0) / max(step, 1)
        else:
            per_step = (now - self._first[1]) / (step - self._first[0])
        return per_step * max(self.budget.steps - step, 0)


@final
class PlainProgress:
    """One line per row, at most every few seconds.

    Args:
        runs: How many runs there will be.
        metrics: The metric to print at the end of a run, by recipe.
        stream: Where to write.
        every_seconds: How often a line may come.
        first: The number of the first run.

    Example:
        >>> with PlainProgress(1, {}, sys.stdout) as shown:
        ...     shown.started(RunConfig("rosenbrock", "SGD", "sgd", "smoke", seed=0, epochs=2), Budget(20, 10))
        ...     shown.row({"step": 10, "train_loss": 0.5, "rate": 0.1, "seconds": 2.0})
        [1/1] rosenbrock SGD seed 0: started, 2 epochs of 10 steps
        [1/1] rosenbrock SGD seed 0: epoch 1/2, loss 0.5, rate 0.1, 2 s left
    """

    def __init__(
        self,
        runs: int | None,
        metrics: Mapping[str, str],
        stream: TextIO,
        every_seconds: float = 5.0,
        first: int = 1,
    ) -> None:
        self._titles = _Titles(runs, metrics, first)
        self.stream = stream
        self.every_seconds = every_seconds
        self._quiet_until = 0.0
        self._pace: Pace | None = None

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):
            self.stream.flush()

    def started(self, config: RunConfig, budget: Budget) -> None:
        """Print the run and its length."""
        self._pace = Pace(budget)
        self._quiet_until = 0.0
        length = (
            f"{counted(budget.steps // budget.steps_per_epoch, 'epoch')} of {counted(budget.steps_per_epoch, 'step')}"
        )
        self._print(f"{self._titles.begin(config)}: started, {length}")

    def row(self, row: Mapping[str, Any]) -> None:
        """Print the row unless the last line is too recent."""
        now = time.monotonic()
        if self._pace is None:
            return
        left = self._pace.left(row, now)
        if now < self._quiet_until:
            return
        self._quiet_until = now + self.every_seconds
        facts = ", ".join(f"{name} {text}" for name, text in _facts(row, self._pace.budget))
        self._print(f"{self._titles.now}: {facts}, {duration(left)} left")

    def finished(self, record: Record) -> None:
        """Print the result."""
        self._print(self._titles.end(record))
        self._pace = None

    def message(self, text: str) -> None:
        """Print it."""
        self._print(text)

    def _print(self, line: str) -> None:
        with suppress(OSError):  # training continues even if the output is closed
            print(line, file=self.stream, flush=True)


@final
class LiveProgress:
    """A line that is redrawn for the current run; finished runs scroll away above it. Needs the package rich.

    Args:
        runs: How many runs there will be.
        metrics: The metric to print at the end of a run, by recipe.
        stream: A terminal.
    """

    def __init__(self, runs: int | None, metrics: Mapping[str, str], stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._titles = _Titles(runs, metrics)
        self._pace: Pace | None = None
        self._task: Any = None
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[facts]}", markup=False),
            console=Console(file=stream, highlight=False),
            refresh_per_second=4,
            transient=True,
        )

    def __enter__(self) -> LiveProgress:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def started(self, config: RunConfig, budget: Budget) -> None:
        """Show a new line."""
        self._drop()
        self._pace = Pace(budget)
        self._task = self._progress.add_task(self._titles.begin(config), total=budget.steps, facts="started")

    def row(self, row: Mapping[str, Any]) -> None:
        """Redraw the line."""
        if self._pace is None:
            return
        facts = "  ".join(f"{name} {text}" for name, text in _facts(row, self._pace.budget))
        left = duration(self._pace.left(row))
        self._progress.update(self._task, completed=row["step"], facts=f"{facts}  {left} left")

    def finished(self, record: Record) -> None:
        """Let the line scroll away with its result."""
        self._drop()
        self.message(self._titles.end(record))

    def message(self, text: str) -> None:
        """Print above the line."""
        self._progress.console.print(text, markup=False, soft_wrap=True)

    def _drop(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._progress.refresh()  # or the line would be printed again below the result
        self._task = self._pace = None


@final
class _Titles:
    """Which run it is, and what its last line says."""

    def __init__(self, runs: int | None, metrics: Mapping[str, str], first: int = 1) -> None:
        self.runs, self.metrics = runs, metrics
        self.now = ""
        self._count = first - 1
        self._running: str | None = None

    def begin(self, config: RunConfig) -> str:
        self._count += 1
        self._running = config.identity()
        place = f"{self._count}/{self.runs}" if self.runs else f"{self._count}"
        self.now = f"[{place}] {config.recipe} {config.label} seed {config.seed}"
        return self.now

    def end(self, record: Record) -> str:
        took = f"in {duration((record.summary or {}).get('seconds') or 0.0)}"
        if self._running != record.config.identity():
            self.begin(record.config)
            # The processes of a sweep report a run only when it ends.
            took = took if self.runs is None else "(finished before)"
        self._running = None
        return f"{self.now}: {self._outcome(record)} {took}"

    def _outcome(self, record: Record) -> str:
        if (record.summary or {}).get("diverged"):
            return "diverged"
        metric = self.metrics.get(record.config.recipe)
        return f"{metric} {figure_text(value(record, metric))}" if metric else "finished"


def counted(number: int, thing: str) -> str:
    """Return a number with the singular or plural of a word."""
    return f"{number} {thing}" + ("s" if number != 1 else "")


def _facts(row: Mapping[str, Any], budget: Budget) -> list[tuple[str, str]]:
    epochs = budget.steps // budget.steps_per_epoch
    facts = [("epoch", f"{row['step'] / budget.steps_per_epoch:.4g}/{epochs}")]
    for name, key in (("loss", "train_loss"), ("rate", "rate")):
        if row.get(key) is not None:
            facts.append((name, f"{row[key]:.3g}"))
    return facts
