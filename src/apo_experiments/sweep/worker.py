"""Workers: they claim points, train their runs and record the results, until nothing is left to do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apo_experiments.errors import UserError
from apo_experiments.interruption import TimeIsUp, check_time, interruptible
from apo_experiments.listeners import Listener
from apo_experiments.processes import Crew
from apo_experiments.recipe import Recipe
from apo_experiments.results import value
from apo_experiments.roles import as_trial
from apo_experiments.sweep.database import open_database, reachable
from apo_experiments.sweep.grid import Point, judging_metric, searches, worst
from apo_experiments.sweep.ledger import Claim, Ledger
from apo_experiments.sweep.presence import Silences, beating, present
from apo_experiments.train import train


@dataclass(frozen=True)
class Order:
    """The task of a worker: plain data, so that it can be sent to another process.

    Attributes:
        recipe: Name of the recipe.
        labels: Labels of entries with a grid; None for all of those.
        scale: The scale of the runs.
        storage: URL of the database.
        root: The folder of all runs.
        data_dir: The folder of the data sets.
        trials: Try this many points of each grid, spread over all of it, instead of the whole grid.
        seeds: How many runs judge a point, by their mean.
        device: Where to train.
        overrides: Options of the task, hyperparameters or ``epochs`` that are set for all points; a key that is set is
            not searched.
        grid: Values to try instead of the recipe's, by key.
        deadline: When to stop, as a value of ``time.time()``.
        patience: Seconds without a heartbeat after which a worker on another machine counts as dead.
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
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    deadline: float | None = None
    patience: float = 120.0


def ledgers(order: Order, recipe: Recipe) -> list[Ledger]:
    """Return the ledgers of all searches of an order."""
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
    """
    silences, folder, waited = Silences(order.patience), order.root / "sweeps", False
    failed: dict[str, set[int]] = {book.search.name: set() for book in books}
    with reachable(order.storage), present(folder) as card:
        while True:
            check_time(order.deadline)
            for book in books:
                for index in book.fail_the_dead(folder, silences):
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
            others = sum(len(book.unfinished() - failed[book.search.name]) for book in books)
            if others == 0:
                return
            if not waited:
                listener.message(f"waiting for {others} trial{'s' if others > 1 else ''} of other workers")
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
    values, metric = [], recipe.metric
    for config in point.configs:
        record = train(config, root=order.root, data_dir=order.data_dir, listener=listener, deadline=order.deadline)
        as_trial(record, config.directory(order.root))
        metric = judging_metric(recipe, record)
        final = value(record, metric)
        if final is None:  # it diverged, so the other seeds do not matter
            return worst(recipe), metric
        values.append(final)
    return math.fsum(values) / len(values), metric


def work_in_processes(order: Order, jobs: int, listener: Callable[[], Listener]) -> None:
    """Process an order with several workers; ``listener`` gives each of them a listener."""
    members = []
    with interruptible() as interruption, Crew(jobs, "apo sweep worker") as crew:
        for _ in range(jobs):
            crew.begin(_worker, (order,), listener())
        while crew.members:
            members += (ended := crew.ended())
            if interruption.requested or any(isinstance(member.result, str) for member in ended):
                crew.ask_to_stop()
    for member in members:
        if isinstance(member.result, str):
            raise UserError(member.result)
    if interruption.requested:
        raise KeyboardInterrupt
    if any(member.stopped for member in members):
        raise TimeIsUp
    codes = [member.process.exitcode for member in members]
    if all(codes):
        raise UserError(
            f"all {jobs} worker processes have died (exit codes {', '.join(map(str, codes))}): run the same "
            "command to resume, with fewer --jobs if memory was short."
        )


def _worker(order: Order, listener: Listener) -> str | None:
    """Run as one of the processes, and return what the user has to fix."""
    from apo_experiments.recipes import RECIPES

    try:
        work(order, ledgers(order, RECIPES[order.recipe]), listener)
    except UserError as error:
        return str(error)
    return None
