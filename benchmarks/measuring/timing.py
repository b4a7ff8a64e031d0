"""Step times of several contenders in one process, taken in turns so that whatever drifts hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .contenders import Contender
from .workloads import Workload

BLOCK = 10  # steps at a time
WINDOW = 100  # steps of each contender in one repeat: a whole number of meta-intervals for all
WARM_UP = 20  # steps before the clock runs; the first one holds the search of the warm start

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Timing:
    """Times of one contender relative to the bare optimizer.

    Attributes:
        ratio: Median over the repeats of its time over the bare optimizer's in the same repeat.
        spread: Interquartile range of these ratios.
        step_seconds: Median time of one step, meta-steps spread over their interval.
    """

    ratio: float
    spread: float
    step_seconds: float


class Runner:
    """A contender with its own network, its own data and its own place in them."""

    def __init__(
        self,
        build: Callable[[torch.nn.Module], Contender],
        workload: Workload,
        device: torch.device,
        fresh_batches: bool = False,
    ) -> None:
        self.contender = build(workload.model(device))
        self._batches = workload.batches(device, fresh_batches)
        self._synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def run(self, steps: int) -> None:
        """Train, and wait until it is done."""
        for _ in range(steps):
            self.contender.step(*next(self._batches))
        self._synchronize()


def interleaved_times(
    runners: Mapping[str, Runner], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the times of each runner's blocks; block i of all runners ran in the same second or so."""
    for runner in runners.values():
        runner.run(WARM_UP)
    times: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for turn in range(repeats * WINDOW // BLOCK):
        start = turn % len(names)  # nobody always follows the same neighbour at the same place
        for name in names[start:] + names[:start]:
            begin = clock()
            runners[name].run(BLOCK)
            times[name].append(clock() - begin)
    return times


def compare(times: list[float], bare: list[float], interval: int) -> Timing:
    """Compare a contender's blocks with the bare optimizer's, a whole number of meta-intervals at a time.

    Example:
        >>> compare([2.0, 2.0, 4.0], [1.0, 2.0, 2.0], interval=10)
        Timing(ratio=2.0, spread=0.5, step_seconds=0.2)
    """
    size = max(1, interval // BLOCK)
    mine, theirs = ([sum(blocks[i : i + size]) for i in range(0, len(blocks), size)] for blocks in (times, bare))
    ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
    spread = 0.0
    if len(ratios) > 1:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        spread = high - low
    return Timing(statistics.median(ratios), spread, statistics.median(mine) / (size * BLOCK))
