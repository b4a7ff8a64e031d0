"""Workers: they claim points, train their runs and record the results, until nothing is left to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from apo_experiments.errors import UserError
from apo_experiments.interruption import TimeIsUp, check_time, interruptible
from apo_experiments.processes import Crew
from apo_experiments.recipe import Recipe
from apo_experiments.recipes import RECIPES
from apo_experiments.records import Record, as_trial
from apo_experiments.results import value
from apo_experiments.runs import RunConfig
from apo_experiments.sweep.database import open_database, reachable
from apo_experiments.sweep.grid import Order, Point, searches
from apo_experiments.sweep.ledger import Claim, Ledger
from apo_experiments.sweep.presence import beating, present
from apo_experiments.train import Listener, train
from apo_experiments.tuning import judgement, judging_metric


def run(
    order: Order,
    jobs: int = 1,
    lanes: Callable[[], Listener] = Listener,
    expect: Callable[[Sequence[RunConfig], int], None] = lambda runs, jobs: None,
) -> list[dict[str, Any]]:
    """Try all points of the grids of a recipe's entries, and return their results.

    A point is one trial of an Optuna study. Finished points are not repeated, interrupted ones resume from their
    checkpoints, and the same call on other machines, with the same storage, shares the work.

    Args:
        order: What is swept.
        jobs: How many processes work here.
        lanes: Gives each of them a listener.
        expect: Is told which runs have no result yet, and how many processes there are.

    Returns:
        One row for each point, the best of each entry first, with the keys ``recipe``, ``method``, ``hyper`` (the
        coordinates), ``metric`` (that of the validation data if the task holds some out), ``value`` (None unless it is
        finite), ``seeds`` and ``outcome``: ``"finished"``, ``"diverged"`` or ``"failed"``.

    Raises:
        UserError: The sweep cannot be run; the message says what to do.
        KeyboardInterrupt: It was interrupted, or time is up; the same call resumes it.
    """
    books = _ledgers(order)  # before any process is started, so that errors show at once
    with reachable(order.url):
        expect([run for book in books for i in sorted(book.unfinished()) for run in book.points[i].configs], jobs)
        if jobs == 1:
            _work(order, books, lanes())
        else:
            _work_in_processes(order, jobs, lanes)
        return [row for book in books for row in book.rows()]


def _ledgers(order: Order) -> list[Ledger]:
    found, storage = searches(RECIPES[order.recipe], order), open_database(order.url)
    with reachable(order.url):
        return [Ledger(search, storage, order.trials) for search in found]


def _work(order: Order, books: Sequence[Ledger], listener: Listener) -> None:
    """Process an order, together with other workers.

    It ends when every point has a result, from any worker. A point whose run fails with an error is tried once by each
    worker.
    """
    folder, waited = order.root / "sweeps", False
    with reachable(order.url), present(folder) as card:
        while True:
            check_time(order.deadline)
            for book in books:
                for index in book.fail_the_dead(folder, order.patience):
                    listener.message(
                        f"{book.search.label}, {book.points[index]}: its worker died, so it is tried again"
                    )
            found = ((book, claim) for book in books if (claim := book.claim(card)))
            if one := next(found, None):
                _carry_out(order, *one, listener)
                waited = False
                continue
            others = sum(len(book.unfinished() - book.failed) for book in books)
            if others == 0:
                return
            if not waited:
                listener.message(f"waiting for {others} trial{'s' if others > 1 else ''} of other workers")
            waited = True
            time.sleep(min(2.0, order.patience / 4))


def _carry_out(order: Order, book: Ledger, claim: Claim, listener: Listener) -> None:
    """Try one point, and record what came of it."""
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
        return
    except BaseException:
        book.fail(claim)
        raise
    if not book.finish(claim, result, metric):
        listener.message(f"{title}: given to another worker, since this one was silent for {order.patience:.0f} s")


def _judge(order: Order, recipe: Recipe, point: Point, listener: Listener) -> tuple[float, str]:
    """Return the mean of the metric over the seeds, and the name of the metric."""
    tried: list[Record] = []
    for config in point.configs:
        record = train(config, root=order.root, data_dir=order.data_dir, listener=listener, deadline=order.deadline)
        tried.append(as_trial(record, config.directory(order.root)))
        if value(record, judging_metric(recipe, record)) is None:  # it diverged, so the other seeds do not matter
            break
    return judgement(recipe, tried), judging_metric(recipe, tried[-1])


def _work_in_processes(order: Order, jobs: int, listener: Callable[[], Listener]) -> None:
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
    try:
        _work(order, _ledgers(order), listener)
    except UserError as error:
        return str(error)
    return None
