"""One worker: claims points, trains their runs and records the results, until nothing is left to do."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apo_experiments.errors import UserError
from apo_experiments.interruption import check_time
from apo_experiments.listeners import Listener
from apo_experiments.recipe import Recipe
from apo_experiments.results import value
from apo_experiments.sweep.database import open_database, reachable
from apo_experiments.sweep.grid import Point, judging_metric, searches, worst
from apo_experiments.sweep.ledger import Claim, Ledger
from apo_experiments.sweep.presence import Silences, beating, present

__all__ = ["Order", "ledgers", "work"]


@dataclass(frozen=True)
class Order:
    """The task of a worker: plain data, so that it can be sent to another process.

    Attributes:
        recipe: Name of the recipe.
        labels: Labels of its entries; None for all with a grid.
        scale: The scale of the runs.
        storage: URL of the database.
        root: The folder of all runs.
        data_dir: The folder of the data sets.
        trials: How many points of each grid; None for all.
        seeds: How many runs judge a point.
        device: Where they run.
        overrides: What is set for all points.
        patience: Seconds without a heartbeat after which a worker elsewhere counts as dead.
        grid: Other values than the recipe's for some keys.
        deadline: When to stop, as a value of ``time.time()``.
    """

    recipe: str
    labels: Sequence[str] | None
    scale: str
    storage: str
    root: Path
    data_dir: Path | None = None
    trials: int | None = None
    seeds: int = 1
    device: str = "cpu"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    patience: float = 120.0
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    deadline: float | None = None

    @property
    def folder(self) -> Path:
        """Where the workers of this machine keep their lock files."""
        return self.root / "sweeps"


def ledgers(order: Order, recipe: Recipe) -> list[Ledger]:
    """Return the ledgers of all searches of an order.

    Raises:
        UserError: There is nothing to search, or the database cannot be opened.
    """
    found = searches(
        recipe,
        order.labels,
        order.scale,
        seeds=order.seeds,
        device=order.device,
        overrides=order.overrides,
        grid=order.grid,
    )
    storage = open_database(order.storage)
    with reachable(order.storage):
        return [Ledger(search, storage, order.trials) for search in found]


def work(order: Order, books: Sequence[Ledger], listener: Listener) -> None:
    """Process an order, together with other workers.

    It ends when every point has a result, from any worker. A point whose run fails with an error is tried once by each
    worker.

    Args:
        order: The order.
        books: Its ledgers.
        listener: Receives the progress of the runs.

    Raises:
        UserError: Something is missing that the user can fix.
        KeyboardInterrupt: It was interrupted, or time is up; the same order resumes it.
    """
    silences = Silences(order.patience)
    failed: dict[str, set[int]] = {book.search.name: set() for book in books}
    waited = False
    with reachable(order.storage), present(order.folder) as card:
        while True:
            check_time(order.deadline)
            for book in books:
                for index in book.fail_the_dead(order.folder, silences):
                    listener.message(
                        f"{book.search.label}, {book.points[index]}: its worker died, so it is tried again"
                    )
            claims = ((book, book.claim(card, failed[book.search.name])) for book in books)
            book, claim = next(((book, claim) for book, claim in claims if claim), (None, None))
            if book is not None and claim is not None:
                if not _carry_out(order, book, claim, listener):
                    failed[book.search.name].add(claim.index)
                waited = False
                continue
            others = sum(len(set(book.unfinished()) - failed[book.search.name]) for book in books)
            if others == 0:
                return
            if not waited:
                listener.message(f"waiting for {others} trials of other workers")
            waited = True
            time.sleep(min(2.0, order.patience / 4))


def _carry_out(order: Order, book: Ledger, claim: Claim, listener: Listener) -> bool:
    """Try one point, and return whether that finished."""
    title = f"{book.search.label}, {claim.point}"
    listener.message(f"{title}: point {claim.index + 1} of {len(book.points)}")
    try:
        with beating(lambda count: book.beat(claim, count), order.patience / 8):
            result, metric = _judge(order, book.search.recipe, claim.point, listener)
    except Exception as error:
        book.fail(claim, f"{type(error).__name__}: {error}")
        if isinstance(error, UserError):
            raise
        listener.message(f"{title}: failed with {type(error).__name__}: {error}")
        return False
    except BaseException:
        book.fail(claim)
        raise
    if not book.finish(claim, result, metric):
        listener.message(f"{title}: given to another worker, since this one was silent for {order.patience:.0f} s")
    return True


def _judge(order: Order, recipe: Recipe, point: Point, listener: Listener) -> tuple[float, str]:
    """Return the mean of the metric over the seeds, and the name of the metric."""
    from apo_experiments.roles import as_trial
    from apo_experiments.train import train

    values = []
    metric = recipe.metric
    for config in point.configs:
        record = train(config, root=order.root, data_dir=order.data_dir, listener=listener, deadline=order.deadline)
        as_trial(record, config.directory(order.root))
        metric = judging_metric(recipe, record)
        final = value(record, metric)
        if final is None:  # it diverged, so the other seeds do not matter
            return worst(recipe), metric
        values.append(final)
    return math.fsum(values) / len(values), metric
