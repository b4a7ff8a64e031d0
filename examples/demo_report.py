"""What the demo prints: the tables, and whether its claims held."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from demo_training import OPTIMIZERS, PRECONDITIONED, Run

MARGIN = 2.0  # points of test accuracy within which a rate counts as good
PAGE_BEGIN, PAGE_END = "<!-- demo:begin (written by examples/demo.py --docs) -->", "<!-- demo:end -->"


@dataclass(frozen=True)
class Summary:
    """Runs that differ in their seed only, averaged (learned rates geometrically)."""

    rate: float
    losses: list[float]
    accuracy: float
    steps: list[int]
    rates: list[float]

    @property
    def loss(self) -> float:
        """Final training loss; infinite if any run ended without one, so that it can be ordered."""
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf


def summaries(runs: Iterable[Run], optimizer: str, tuned: bool) -> list[Summary]:
    """Average over seeds, in the order of the initial rates."""
    by_rate: dict[float, list[Run]] = {}
    for run in runs:
        if run.job.optimizer == optimizer and run.job.tuned == tuned:
            by_rate.setdefault(run.job.rate, []).append(run)
    return [
        Summary(
            rate,
            _over_seeds(statistics.fmean, [run.losses for run in group]),
            statistics.fmean(run.accuracy for run in group),
            min((run.steps for run in group), key=len),
            _over_seeds(statistics.geometric_mean, [run.rates for run in group]),
        )
        for rate, group in sorted(by_rate.items())
    ]


def _over_seeds(mean: Callable[[Iterable[float]], float], series: list[list[float]]) -> list[float]:
    longest = max(len(values) for values in series)
    if any(len(values) < longest for values in series):  # a run that was broken off
        series = [values + [math.nan] * (longest - len(values)) for values in series]
    return [mean(values) for values in zip(*series, strict=True)]


def verdict(summary: Summary, best_accuracy: float) -> str:
    """Say in words how a fixed rate fared."""
    if summary.loss > summary.losses[0]:
        return "diverged"
    if summary.accuracy < 50:
        return "did not learn"
    shortfall = best_accuracy - summary.accuracy
    return "good" if shortfall <= MARGIN else f"{shortfall:.1f} points short"


def report(runs: list[Run]) -> str:
    """Return all that the demo prints: a table for each optimizer, APO-Precond, and the claims."""
    seeds, epochs = len({run.job.seed for run in runs}), runs[0].job.epochs
    lines = [f"Digits: 64-100-100-10 network, {epochs} epochs, batches of 32, {_count(seeds)}.", ""]
    for optimizer in OPTIMIZERS:
        lines += [*_table(runs, optimizer), ""]
    lines += ["APO's rows are identical: its warm start finds the same rate on the first batch from every start.", ""]
    for summary in summaries(runs, PRECONDITIONED, tuned=True):
        lines += [
            "APO-Precond, apo.Preconditioned(apo.Kronecker(model, lr=1.0), warm_start=0.5):",
            f"  training loss {_number(summary.loss).strip()}, test accuracy {summary.accuracy:.1f}%",
            "",
        ]
    for optimizer in OPTIMIZERS:
        lines += _claims(runs, optimizer)
    return "\n".join(lines)


def _table(runs: list[Run], optimizer: str) -> list[str]:
    fixed, tuned = summaries(runs, optimizer, tuned=False), summaries(runs, optimizer, tuned=True)
    best = max(summary.accuracy for summary in fixed)
    lines = [
        optimizer,
        "         |           rate stays fixed            |  APO learns the rate from there",
        " initial |   train     test                      |   train     test   learned",
        "    rate |    loss    acc.   verdict             |    loss    acc.      rate",
        "---------+---------------------------------------+--------------------------------",
    ]
    for left, right in zip(fixed, tuned, strict=True):
        lines.append(
            f"   {left.rate:.0e} | {_number(left.loss)}  {left.accuracy:5.1f}%   {verdict(left, best):<20}"
            f"| {_number(right.loss)}  {right.accuracy:5.1f}%   {right.rates[-1]:7.1e}"
        )
    return lines


def _count(seeds: int) -> str:
    return "one seed" if seeds == 1 else f"mean of {seeds} seeds"


def _number(loss: float) -> str:
    if not math.isfinite(loss):
        return "    NaN"
    return f"{loss:7.4f}" if loss < 10 else f"{loss:7.0f}"


def _claims(runs: list[Run], optimizer: str) -> list[str]:
    """Check what the project promises of this demo, against these very runs."""
    fixed, tuned = summaries(runs, optimizer, tuned=False), summaries(runs, optimizer, tuned=True)
    best = max(summary.accuracy for summary in fixed)
    good = sum(verdict(summary, best) == "good" for summary in fixed)
    worst = min(summary.accuracy for summary in tuned)
    highest, median = max(summary.loss for summary in tuned), statistics.median(summary.loss for summary in fixed)
    return [
        f"{optimizer}, from every initial rate between {fixed[0].rate:.0e} and {fixed[-1].rate:.0e}:",
        f"  fixed rates: {good} of {len(fixed)} come within {MARGIN:g} points of the best one ({best:.1f}%).",
        f"  {_held(worst >= best - MARGIN)}: APO ends within {MARGIN:g} points of the best fixed rate "
        f"(its worst run has {worst:.1f}%).",
        f"  {_held(highest < median)}: APO ends at a lower training loss than the median fixed rate "
        f"(at most {highest:.4f} against {median:.4f}).",
    ]


def _held(claim: bool) -> str:
    return "HELD" if claim else "DID NOT HOLD"


def write_page(page: Path, text: str) -> None:
    """Replace the text between the two marks of a page."""
    before, rest = page.read_text().split(PAGE_BEGIN)
    _, after = rest.split(PAGE_END)
    page.write_text(f"{before}{PAGE_BEGIN}\n```text\n{text}\n```\n{PAGE_END}{after}")
