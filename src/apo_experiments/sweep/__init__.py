"""Sweeps: the paper's grids, tried by any number of workers on any number of machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from apo_experiments.errors import UserError
from apo_experiments.listeners import Listener, Silence
from apo_experiments.recipe import Recipe
from apo_experiments.records import Record
from apo_experiments.runs import RunConfig
from apo_experiments.sweep.database import address, exists, import_optuna, open_database, reachable
from apo_experiments.sweep.ledger import as_records
from apo_experiments.sweep.worker import Order, ledgers, work, work_in_processes

__all__ = ["Order", "run", "tried"]


def run(
    recipe: Recipe,
    labels: Sequence[str] | None = None,
    scale: str = "cpu",
    *,
    root: Path,
    storage: str | None = None,
    jobs: int = 1,
    listener: Listener | None = None,
    lanes: Callable[[], Listener] | None = None,
    expect: Callable[[Sequence[RunConfig]], None] | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Try all points of the grids of a recipe's entries, and return their results.

    A point is one trial of an Optuna study. Finished points are not repeated, interrupted ones resume from their
    checkpoints, and the same call on other machines, with the same storage, shares the work.

    Args:
        recipe: The recipe.
        labels: Labels of entries with a grid; all of those by default.
        scale: The scale of the runs.
        root: The folder of all runs.
        storage: URL of the database, such as ``postgresql://user@host/name``; by default an SQLite file among the runs.
        jobs: How many processes work here.
        listener: Receives the progress of the runs.
        lanes: Gives each of several workers a listener; the same for all by default.
        expect: Is told which runs have no result yet.
        settings: The other attributes of an :class:`Order`.

    Returns:
        One row for each point, the best of each entry first, with the keys ``recipe``, ``method``, ``hyper`` (the
        coordinates), ``metric`` (that of the validation data if the task holds some out), ``value`` (None unless it is
        finite), ``seeds`` and ``outcome``: ``"finished"``, ``"diverged"`` or ``"failed"``.

    Raises:
        UserError: The sweep cannot be run; the message says what to do.
        KeyboardInterrupt: It was interrupted, or time is up; the same call resumes it.
    """
    import_optuna()
    order = Order(recipe.name, labels, scale, address(storage, Path(root)), Path(root), **settings)
    for name, number in (("trials", order.trials), ("seeds", order.seeds), ("jobs", jobs)):
        if number is not None and number < 1:
            raise UserError(f"{name} was {number}: it must be at least 1.")
    books = ledgers(order, recipe)  # before any process is started, so that errors show at once
    shown = listener or Silence()
    with reachable(order.storage):
        if expect is not None:
            expect([run for book in books for i in sorted(book.unfinished()) for run in book.points[i].configs])
        if jobs == 1:
            work(order, books, shown)
        else:
            work_in_processes(order, jobs, lanes or (lambda: shown))
        return [row for book in books for row in book.rows()]


def tried(recipe: Recipe, scale: str, storage: str, root: Path = Path("runs")) -> list[Record]:
    """Return what all sweeps of a recipe in a database have found, as records without curves, one a point."""
    url = address(storage, Path(root))
    if not exists(url):  # opening would create it
        return []
    with reachable(url):
        return as_records(open_database(url), recipe.name, scale)
