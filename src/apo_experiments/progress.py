"""The progress of runs: bars on a terminal, plain lines in a log.

Both go to standard error, so that standard output has only the results. One bar is for the whole command, and each run
that is being trained has one below it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, TextIO, final

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from apo_experiments.problem import Budget
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record
from apo_experiments.results import figure_text, value
from apo_experiments.runs import RunConfig
from apo_experiments.train import Listener


def counted(number: int, thing: str) -> str:
    """Return a number with the singular or plural of a word.

    Example:
        >>> counted(1, "seed"), counted(3, "seed")
        ('1 seed', '3 seeds')
    """
    return f"{number} {thing}" + ("s" if number != 1 else "")


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
class Progress(AbstractContextManager["Progress"]):
    """Shows all runs of a command, each in a lane.

    The whole command takes as long as the runs at work still need, by their own pace, and as the recipes say about the
    others, corrected by how much longer or shorter than that the runs here have taken.
    """

    def __init__(self, recipes: Sequence[Recipe], stream: TextIO | None = None, every_seconds: float = 5.0) -> None:
        self.recipes = {recipe.name: recipe for recipe in recipes}
        self.stream: TextIO = sys.stderr if stream is None else stream
        self.every_seconds = every_seconds
        self.runs = self.begun = self.done = 0
        self.jobs = 1
        self.waiting: dict[str, float] = {}  # the seconds that runs which have not begun are expected to take
        self.lanes: list[Lane] = []
        self.complete = self.taken = self.expected = 0.0
        self.bars: Any = None
        if self.stream.isatty() and os.environ.get("TERM", "") != "dumb":
            self.bars = Bars(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=16),
                TextColumn("{task.fields[facts]}", markup=False),
                console=Console(file=self.stream, highlight=False),
                refresh_per_second=4,
                transient=True,
            )
        self._whole: Any = None
        self._warned = False

    def __enter__(self) -> Progress:
        if self.bars is not None:
            self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bars is not None:
            self.bars.stop()
        with suppress(OSError):
            self.stream.flush()

    def expect(self, left: Sequence[RunConfig], jobs: int = 1, finished: int = 0) -> None:
        """Announce which runs are left to train and how many are finished, and warn if it takes days."""
        self.runs, self.jobs, self.waiting = len(left) + finished, jobs, {}
        for run in left:  # what the recipe says about all of its methods and seeds, shared out
            recipe, scale = self.recipes[run.recipe], self.recipes[run.recipe].scales[run.scale]
            share = run.epochs / max(scale.epochs, 1) / max(len(recipe.entries) * scale.seeds, 1)
            self.waiting[run.identity()] = 60 * scale.minutes * share
        seconds = sum(self.waiting.values())
        if self.bars is not None and self.runs > 1:
            self._whole = self.bars.add_task("all runs", total=seconds or 1, facts="")
            self.refresh()
        on_cpu = any(run.scale == "paper" and run.device == "cpu" for run in left)
        if seconds / jobs >= (3_600 if on_cpu else 86_400):  # an hour of a GPU is days of a CPU
            machine = "one GPU" if any(run.scale == "paper" for run in left) else "two cores"
            machine += ", and many times as long on a CPU as here" if on_cpu else ""
            self.warn(f"This will take about {duration(seconds / jobs)} on {machine} ({counted(len(left), 'run')})")

    def warn(self, sentence: str) -> None:
        """Print, once, that it will take long, and what to do about it."""
        if not self._warned:
            self.message(
                f"{sentence}. Ctrl-C stops it, and the same command resumes it; --method, --seeds, --epochs and a "
                "smaller --scale make it shorter."
            )
        self._warned = True

    def lane(self) -> Lane:
        """Return a listener for one run at a time, beside others."""
        self.lanes.append(Lane(self))
        return self.lanes[-1]

    def message(self, text: str) -> None:
        """Print something, above the bars."""
        with suppress(OSError):  # training continues even if the output is closed
            if self.bars is not None:
                self.bars.console.print(text, markup=False, soft_wrap=True)
            else:
                print(text, file=self.stream, flush=True)

    def failed(self, config: RunConfig) -> None:
        """Forget a run that has ended without a result, perhaps with its process."""
        self.waiting.pop(config.identity(), None)
        for lane in self.lanes:
            if lane.identity == config.identity():
                lane.drop()
        self.refresh()

    def left(self) -> float:
        """Return the seconds that all runs together still need."""
        busy = [lane for lane in self.lanes if lane.seconds_left is not None]
        taken = self.taken + sum(lane.seconds_in_all for lane in busy)
        expected = self.expected + sum(lane.expected for lane in busy)
        correction = taken / expected if taken > 0 and expected > 0 else 1.0
        running = [lane.seconds_left or 0.0 for lane in busy]
        rest = correction * sum(self.waiting.values())
        at_a_time = max(len(busy), min(self.jobs, len(busy) + len(self.waiting)), 1)
        return max([(rest + sum(running)) / at_a_time, *running])

    def refresh(self) -> None:
        """Redraw the bar of the whole command."""
        if self._whole is not None:
            complete = self.complete + sum(lane.expected * lane.share for lane in self.lanes)
            facts = f"{self.done} of {self.runs} done  {duration(self.left())} left"
            self.bars.update(self._whole, completed=complete, facts=facts)


@final
class Lane(Listener):
    """The listener of one run at a time.

    Its pace is measured from the first two rows of this session on, in wall time, which includes evaluation. Before
    that, the training time of all sessions has to do.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._reset()

    def _reset(self) -> None:
        self.title, self.identity, self.task = "", "", None
        self.budget: Budget | None = None
        self.expected = self.share = self.seconds_in_all = 0.0
        self.seconds_left: float | None = None
        self._first: tuple[int, float] | None = None
        self._began, self._quiet_until = time.monotonic(), 0.0

    def _begin(self, config: RunConfig) -> None:
        self.drop()
        shown = self._progress
        shown.begun += 1
        shown.runs = max(shown.runs, shown.begun) if shown.runs else 0
        self.expected = shown.waiting.get(config.identity(), 0.0)
        shown.failed(config)  # which it has if its worker died, so that it is resumed here
        self.identity = config.identity()
        place = f"{shown.begun}/{shown.runs}" if shown.runs else f"{shown.begun}"
        self.title = f"[{place}] {config.recipe} {config.label} seed {config.seed}"

    def started(self, config: RunConfig, budget: Budget) -> None:
        """Show the run and its length."""
        self._begin(config)
        self.budget = budget
        if self._progress.bars is not None:
            self.task = self._progress.bars.add_task(self.title, total=budget.steps, facts="started")
            return
        epochs = counted(budget.steps // budget.steps_per_epoch, "epoch")
        self._progress.message(f"{self.title}: started, {epochs} of {counted(budget.steps_per_epoch, 'step')}")

    def row(self, row: Mapping[str, Any]) -> None:
        """Show the row; in a log unless the last line is too recent."""
        if self.budget is None:
            return
        now, step = time.monotonic(), row["step"]
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            per_step = row.get("seconds", 0.0) / max(step, 1)
        else:
            per_step = (now - self._first[1]) / (step - self._first[0])
        self.share, self.seconds_in_all = step / self.budget.steps, per_step * self.budget.steps
        self.seconds_left = left = per_step * max(self.budget.steps - step, 0)
        if self._progress.left() >= 86_400:
            self._progress.warn(f"At this pace all runs take another {duration(self._progress.left())}")
        facts = [f"epoch {step / self.budget.steps_per_epoch:.4g}/{self.budget.steps // self.budget.steps_per_epoch}"]
        for name, key in (("loss", "train_loss"), ("rate", "rate")):
            if row.get(key) is not None:
                facts.append(f"{name} {row[key]:.3g}")
        facts.append(f"{duration(left)} left")
        if self._progress.bars is not None:
            self._progress.bars.update(self.task, completed=step, facts="  ".join(facts))
            self._progress.refresh()
        elif now >= self._quiet_until:
            self._quiet_until = now + self._progress.every_seconds
            whole = f" (all runs: {duration(self._progress.left())})" if self._progress.runs > 1 else ""
            self._progress.message(f"{self.title}: {', '.join(facts)}{whole}")

    def finished(self, record: Record) -> None:
        """Let the bar scroll away with the result."""
        shown, summary = self._progress, record.summary or {}
        if self.identity == record.config.identity():
            took = f"in {duration(summary.get('seconds') or 0.0)}"
            shown.taken += time.monotonic() - self._began
            shown.expected += self.expected
        else:
            self._begin(record.config)
            took = "(finished before)"
        shown.done += 1
        shown.complete += self.expected
        recipe = shown.recipes.get(record.config.recipe)
        outcome = f"{recipe.metric} {figure_text(value(record, recipe.metric))}" if recipe else "finished"
        title = self.title
        self.drop()
        shown.refresh()
        shown.message(f"{title}: {'diverged' if summary.get('diverged') else outcome} {took}")

    def message(self, text: str) -> None:
        """Print something with the name of the run, since there may be others beside it."""
        self._progress.message(f"{self.title}: {text}" if self.title else text)

    def drop(self) -> None:
        """Remove the bar of a run that has ended or failed."""
        if self.task is not None:
            self._progress.bars.remove_task(self.task)
            self._progress.bars.refresh()  # or the bar would be printed again below the result
        self._reset()
