"""Sweeps: the paper's grids, tried by any number of workers on any number of machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apo_experiments.errors import UserError
from apo_experiments.listeners import Listener, Silence
from apo_experiments.recipe import Recipe
from apo_experiments.sweep.database import address, has_study, import_optuna, open_database, reachable
from apo_experiments.sweep.grid import searches
from apo_experiments.sweep.ledger import Ledger
from apo_experiments.sweep.worker import Order, ledgers, work

__all__ = ["best", "run"]


def run(
    recipe: Recipe,
    labels: Sequence[str] | None = None,
    scale: str = "cpu",
    *,
    storage: str | None = None,
    trials: int | None = None,
    seeds: int = 1,
    root: Path,
    data_dir: Path | None = None,
    device: str = "cpu",
    listener: Listener | None = None,
    jobs: int = 1,
    overrides: Mapping[str, Any] | None = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    deadline: float | None = None,
    patience: float = 120.0,
) -> list[dict[str, Any]]:
    """Try all points of the grids of a recipe's entries, and return their results.

    A point is one trial of an Optuna study. Finished points are not repeated, interrupted ones resume from their
    checkpoints, and the same call on other machines, with the same storage, shares the work.

    Args:
        recipe: The recipe.
        labels: Labels of entries with a grid; all of those by default.
        scale: The scale of the runs.
        storage: URL of the database, such as ``postgresql://user@host/name``; by default an SQLite file among the runs.
        trials: Try this many points of each grid, spread over all of it, instead of the whole grid.
        seeds: How many runs judge a point, by their mean.
        root: The folder of all runs.
        data_dir: The folder of the data sets.
        device: Where to train.
        listener: Receives the progress of the runs.
        jobs: How many processes work here.
        overrides: Options of the task, hyperparameters or ``epochs`` that are set for all points; a key that is set is
            not searched.
        grid: Values to try instead of the recipe's, by key.
        deadline: When to stop, as a value of ``time.time()``.
        patience: Seconds without a heartbeat after which a worker on another machine counts as dead.

    Returns:
        One row for each point, the best of each entry first, with the keys ``recipe``, ``method``, ``hyper`` (the
        coordinates), ``metric`` (that of the validation data if the task holds some out), ``value`` (None unless it is
        finite), ``seeds`` and ``outcome``: ``"finished"``, ``"diverged"`` or ``"failed"``.

    Raises:
        UserError: The sweep cannot be run; the message says what to do.
        KeyboardInterrupt: It was interrupted, or time is up; the same call resumes it.

    Example:
        >>> import tempfile
        >>> from apo_experiments.recipes import RECIPES
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rows = run(RECIPES["rosenbrock"], None, "smoke", trials=1, root=Path(folder))
        >>> rows[0]["outcome"]
        'finished'
    """
    import_optuna()
    for name, number in (("trials", trials), ("seeds", seeds), ("jobs", jobs)):
        if number is not None and number < 1:
            raise UserError(f"{name} was {number}: it must be at least 1.")
    listener = listener or Silence()
    order = Order(
        recipe.name,
        labels,
        scale,
        address(storage, Path(root)),
        Path(root),
        data_dir,
        trials,
        seeds,
        device,
        dict(overrides or {}),
        patience,
        dict(grid or {}),
        deadline,
    )
    books = ledgers(order, recipe)  # before any process is started, so that errors show at once
    if jobs == 1:
        work(order, books, listener)
    else:
        from apo_experiments.sweep.jobs import work_in_processes

        work_in_processes(order, jobs, listener)
    with reachable(order.storage):
        return [row for book in books for row in book.rows()]


def best(
    recipe: Recipe,
    label: str,
    scale: str,
    storage: str | None = None,
    *,
    root: Path = Path("runs"),
    seeds: int = 1,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the best point that a sweep has found so far.

    Args:
        recipe: The recipe.
        label: Label of the entry.
        scale: The scale of the runs.
        storage: As for :func:`run`, and so are the others.
        root: The folder of all runs.
        seeds: How many runs judge a point.
        overrides: What is set for all points.

    Returns:
        Its row, as from :func:`run`; ``hyper`` has the hyperparameters.

    Raises:
        UserError: The sweep has not been run.

    Example:
        >>> import tempfile
        >>> from apo_experiments.recipes import RECIPES
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     best(RECIPES["rosenbrock"], "SGD", "smoke", root=Path(folder))
        Traceback (most recent call last):
        ...
        apo_experiments.errors.UserError: no point of SGD in rosenbrock has been tried at scale smoke: run `apo sweep
        rosenbrock --scale smoke --method SGD` first.
    """
    url = address(storage, Path(root))
    (search,) = searches(recipe, [label], scale, seeds=seeds, overrides=overrides)
    rows = []
    if has_study(url, search.name):  # checked first, because opening would create an empty study
        book = Ledger(search, open_database(url))
        with reachable(url):
            rows = [row for row in book.rows() if row["outcome"] == "finished"]
    if not rows:
        raise UserError(
            f"no point of {label} in {recipe.name} has been tried at scale {scale}: run `apo sweep {recipe.name} "
            f"--scale {scale} --method {label}` first."
        )
    return rows[0]
