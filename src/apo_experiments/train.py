"""One loop that trains every recipe.

A run depends on its :class:`RunConfig` alone: the seed sets the weights, the order of the data and dropout, evaluation
has no side effects, and a resumed run gives the same result as an uninterrupted one. On a GPU no step waits for the
host: losses are summed on the device and read once per epoch, and every few seconds for the progress display.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from apo_experiments.errors import UserError
from apo_experiments.interruption import check_time, interruptible
from apo_experiments.locks import locked
from apo_experiments.problem import Budget
from apo_experiments.recipe import Recipe, Setting
from apo_experiments.recipes import RECIPES
from apo_experiments.records import NAME, Record, RecordWriter, read
from apo_experiments.runs import RunConfig
from apo_experiments.training import Checkpoint, Training

#: How a step says that there is nothing left to train; apo.NonFiniteError is the first of them.
_DIVERGENCE = (FloatingPointError, torch.linalg.LinAlgError)  # pyright: ignore[reportPrivateImportUsage]
_BOOKKEEPING = ("kind", "step", "epoch", "seconds")


class Listener:
    """Receives the progress of a run: for the command line's display, or to pass it on. This one ignores everything."""

    def started(self, config: RunConfig, budget: Budget) -> None:
        """A run starts or resumes; one that was finished before is only reported as ``finished``."""

    def row(self, row: Mapping[str, Any]) -> None:
        """An epoch is over; if it is not, the row covers its steps so far and has no metrics."""

    def finished(self, record: Record) -> None:
        """The run has finished."""

    def message(self, text: str) -> None:
        """A message for the user."""


def train(
    config: RunConfig,
    *,
    root: Path,
    data_dir: Path | None = None,
    listener: Listener | None = None,
    checkpoint_seconds: float = 20.0,
    row_seconds: float = 10.0,
    deadline: float | None = None,
    chosen_by: Mapping[str, Any] | None = None,
) -> Record:
    """Train one run to the end: from the start, from its checkpoint, or not at all if it is finished.

    Ctrl-C and SIGTERM end it after the current step, with a checkpoint. Torch's random number generators belong to the
    process, so a process trains one run at a time.

    Args:
        config: The run.
        root: The folder of all runs.
        data_dir: The folder of the data sets.
        listener: Receives progress.
        checkpoint_seconds: How much work a crash may cost.
        row_seconds: How often to report an epoch that is not over yet.
        deadline: When to stop between two steps, with a checkpoint, as a value of ``time.time()``.
        chosen_by: How the hyperparameters were chosen, for the record's header.

    Returns:
        The finished record. A run whose loss is no longer finite is finished too: its summary says ``diverged``.

    Raises:
        UserError: The run cannot be trained; the message says what to do.
        KeyboardInterrupt: It was interrupted, or (:class:`TimeIsUp`) the deadline passed; the same call resumes it.
    """
    listener = listener or Listener()
    directory = config.directory(Path(root))
    record = finished(directory)
    if record is None:
        check_time(deadline)
        if config.recipe not in RECIPES:
            raise UserError(f"there is no recipe {config.recipe!r}: choose one of {', '.join(sorted(RECIPES))}.")
        recipe, setting = RECIPES[config.recipe], Setting(config.seed, _device(config.device), data_dir)
        torch.manual_seed(config.seed)
        if recipe.compute is not None:
            record = _compute(config, recipe, setting, directory, listener)
        else:
            # Built before anything is written, so that missing data or packages leave no trace of the run.
            run = _built(config, recipe, setting)
            with locked(directory / "lock"):
                checkpoint = Checkpoint(directory, checkpoint_seconds)
                record = finished(directory)
                if record is None:
                    writer = RecordWriter(directory, config, chosen_by)
                    record = _train(run, writer, checkpoint, listener, row_seconds, deadline)
    listener.finished(record)
    return record


def finished(directory: Path) -> Record | None:
    """Return the record of a run in a folder if it has finished, or None."""
    try:
        record = read(directory / NAME)
    except UserError:
        return None
    if not record.finished or not isinstance((record.summary or {}).get("metrics"), dict):  # the second is damage
        return None
    with suppress(UserError):  # left behind by a process that was killed after its last line
        Checkpoint(directory).remove()
    return record


def _built(config: RunConfig, recipe: Recipe, setting: Setting) -> Training:
    """Build a run; errors of networks, optimizers and data are due to the user's settings."""
    try:
        run = Training(config, recipe, setting)
        if run.budget.steps_per_epoch < 1:
            raise ValueError("an epoch has no steps")
        return run
    except (TypeError, ValueError, ZeroDivisionError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
        raise UserError(
            f"{config.label} of {config.recipe} cannot be built with these settings ({reason}): choose other values "
            "with --set."
        ) from error


def _train(
    run: Training,
    writer: RecordWriter,
    checkpoint: Checkpoint,
    listener: Listener,
    row_seconds: float,
    deadline: float | None,
) -> Record:
    """Step, evaluate, record and save to the end, and close the record."""
    listener.started(run.config, run.budget)
    _resume(run, writer, checkpoint, listener)
    reason, told = None, time.monotonic()
    with interruptible(deadline) as interruption:
        run.start_clock()
        try:
            while run.step < run.budget.steps:
                run.advance()
                if run.step % run.budget.steps_per_epoch == 0:
                    row = run.close_epoch()
                    writer.append(row)
                    listener.row(row)
                    _check_metric(run.recipe, row, at_the_end=run.step == run.budget.steps)
                    told = time.monotonic()
                elif time.monotonic() - told > row_seconds:
                    listener.row(run.row())
                    told = time.monotonic()
                if checkpoint.due() or interruption.due:
                    state = run.state_dict()
                    with run.off_the_clock():
                        writer.sync()  # before the checkpoint, which must not refer to rows that a power cut has lost
                        checkpoint.save(state)
                    if interruption.due:
                        place = f"step {run.step} of {run.budget.steps}"
                        listener.message(f"stopped after {place}; run the same command to resume")
                        interruption.obey()
        except _DIVERGENCE as error:
            reason = str(error)
            listener.message(f"{run.config.label}, seed {run.config.seed}, diverged: {reason}")
    rows = read(writer.path).rows
    writer.finish(_summary(run.recipe, rows, rows[-1] if rows else {}, run.seconds(), run.step, reason))
    checkpoint.remove()
    if interruption.requested:  # too late for this run, but it stops the next one
        raise KeyboardInterrupt
    return read(writer.path)


def _resume(run: Training, writer: RecordWriter, checkpoint: Checkpoint, listener: Listener) -> None:
    """Bring the run and its record to the checkpoint, or to the beginning."""
    state = checkpoint.load(run.device)
    if state is None:
        writer.truncate_to(0)
        return
    try:
        step, device = int(state["step"]), state["device"]
        rows = writer.truncate_to(step)
        if len(rows) != step // run.budget.steps_per_epoch:
            listener.message(f"{writer.path} has lost rows, so the run starts again")
            checkpoint.remove()
            writer.truncate_to(0)
            return
        run.load_state_dict(state)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"{checkpoint.path} does not fit this version of the program ({type(error).__name__}): delete it, and run "
            "the same command to start again."
        ) from error
    listener.message(f"resuming from step {run.step} of {run.budget.steps}")
    if device != run.device.type:
        listener.message(f"the run started on {device}; on {run.device.type} it continues, but not bit for bit")


def _compute(config: RunConfig, recipe: Recipe, setting: Setting, directory: Path, listener: Listener) -> Record:
    """Compute a recipe that is not a training run."""
    assert recipe.compute is not None
    listener.started(config, Budget(1, 1))
    began = time.monotonic()
    rows, metrics = recipe.compute(config.options, setting, config.hyper)
    seconds = time.monotonic() - began
    reason = None
    try:
        _check_metric(recipe, metrics, at_the_end=True)
    except FloatingPointError as error:
        reason = str(error)
    with locked(directory / "lock"):
        writer = RecordWriter(directory, config)
        writer.truncate_to(0)
        writer.append(*({"step": step, **row} for step, row in enumerate(rows)))
        writer.finish(_summary(recipe, [], metrics, seconds, len(rows), reason))
    return read(writer.path)


def _check_metric(recipe: Recipe, row: Mapping[str, Any], at_the_end: bool) -> None:
    """Raise if the recipe's metric is not finite; a costly one may be missing until the end."""
    if at_the_end and recipe.metric not in row:
        raise ValueError(
            f"recipe {recipe.name!r} shows the metric {recipe.metric!r}, but its task reports only {sorted(row)}"
        )
    if not math.isfinite(row.get(recipe.metric, 0.0)):
        raise FloatingPointError(f"{recipe.metric} is {row[recipe.metric]}")


def _summary(
    recipe: Recipe, rows: list[dict[str, Any]], last: Mapping[str, Any], seconds: float, steps: int, reason: str | None
) -> dict[str, Any]:
    """Return the summary: the values of the last row, the row with the best metric, and whether the run diverged.

    A run that diverged has no final values: its last good row is not its result.
    """
    metrics = {name: value for name, value in last.items() if name not in _BOOKKEEPING}
    if reason is not None:
        metrics = dict.fromkeys([*metrics, recipe.metric])
    comparable = [row for row in rows if row.get(recipe.metric) is not None]
    best_row = recipe.best(comparable, key=lambda row: row[recipe.metric], default=metrics)
    best_row = {name: value for name, value in best_row.items() if name != "kind"}
    summary = {"metrics": metrics, "best": best_row, "seconds": seconds, "steps": steps, "diverged": reason is not None}
    return summary if reason is None else {**summary, "reason": reason}


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"the device {name!r} is unknown: use cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"the device {name!r} is not available, since torch finds no CUDA: use --device cpu.")
    return device
