"""Twelve initial rates from 1e-8 to 1e3, fixed against learned: what APO takes off your hands.

A small network learns scikit-learn's handwritten digits with SGD with momentum and with Adam. Every rate is used twice:
as it is, and as the place where APO starts, with its defaults. APO-Precond learns a matrix instead of a rate.

    python examples/demo.py            # table, figure in demo-output/demo.png, under two minutes on two cores
    python examples/demo.py --quick    # a few rates and epochs, to see that it runs
    python examples/demo.py --docs     # also update docs/demo.md and its figure
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from demo_figure import draw
from demo_report import report, write_page
from demo_training import Job, Run, jobs, train

ROOT = Path(__file__).resolve().parents[1]


def run_all(todo: list[Job], processes: int) -> list[Run]:
    print(f"{len(todo)} short trainings, {processes} at a time ", end="", flush=True)
    if processes == 1:
        runs = [_noted(run) for run in map(train, todo)]
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            runs = [_noted(run) for run in pool.map(train, todo)]
    print()
    return runs


def _noted(run: Run) -> Run:
    print(".", end="", flush=True)
    return run


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rates, one seed, three epochs")
    parser.add_argument("--seeds", type=int, default=2, help="runs to average over")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=ROOT / "demo-output", help="folder for the figure")
    parser.add_argument("--docs", action="store_true", help="update docs/demo.md and its figure")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    start = time.perf_counter()
    decades, epochs = ((-8, -2, 3), 3) if options.quick else (range(-8, 4), 20)
    seeds = 1 if options.quick else options.seeds
    runs = run_all(jobs(decades, seeds, epochs), options.processes)
    text = report(runs)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    figure = options.out / "demo.png"
    draw(runs, figure)
    if options.docs:
        write_page(ROOT / "docs" / "demo.md", text)
        draw(runs, ROOT / "docs" / "assets" / "demo.png")
    print(f"\n{time.perf_counter() - start:.0f} s. The figure is {os.path.relpath(figure)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
