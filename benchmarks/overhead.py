"""What apo costs: step time and peak memory against the bare optimizer.

    python benchmarks/overhead.py --json results.json

See the README beside this file for what is measured and how.
"""

from __future__ import annotations

import argparse
import os
from fnmatch import fnmatch
from pathlib import Path

# torch's profiler, which counts the memory, announces every start and stop unless told not to before the import
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from measuring.cases import CASES, MISSING, cases_for, measure
from measuring.results import environment, hardware_line, read_json, text_table, updated, write_json, write_markdown
from measuring.timing import CLOCKS, WINDOW
from measuring.workloads import CPU_WORKLOADS, CUDA_WORKLOADS, SMOKE_WORKLOADS


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--update", action="store_true", help="keep the cases of that file that are not measured now")
    parser.add_argument("--markdown", type=Path, help="Markdown file whose table of results is replaced")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5, help=f"how often {WINDOW} steps of each case are timed")
    parser.add_argument("--cases", nargs="+", default=["*"], help="names or patterns such as 'cnn/lr-*' (default: all)")
    parser.add_argument("--threads", type=int, default=_cores(), help="CPU threads of torch")
    parser.add_argument(
        "--clock", choices=tuple(CLOCKS), default="wall", help="'cpu' with --threads 1 on a busy machine"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny networks, one repeat: only to see that it runs")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use: leave it out to measure the CPU")
    return options


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    workloads = CUDA_WORKLOADS if options.device == "cuda" else CPU_WORKLOADS
    workloads, repeats = (SMOKE_WORKLOADS, 1) if options.smoke else (workloads, options.repeats)
    where = environment(device, options.clock)
    try:
        earlier = read_json(options.json, where) if options.update else []
    except ValueError as error:
        raise SystemExit(f"--update: {error}") from None
    rows = []
    for workload in workloads:
        known = cases_for(workload)
        chosen = [name for name in known if any(fnmatch(f"{workload.name}/{name}", p) for p in options.cases)]
        for name in chosen:
            if name in MISSING:
                print(f"{workload.name}/{name} is left out: {MISSING[name]}")
        chosen = [name for name in chosen if name not in MISSING]
        if chosen:
            rows += measure(workload, chosen, device, repeats, CLOCKS[options.clock])
    if not rows:
        raise SystemExit(f"no case fits --cases {' '.join(options.cases)}: the names are {', '.join(CASES)}")
    rows = updated(earlier, rows)
    write_json(options.json, rows, where)
    if options.markdown is not None:
        write_markdown(options.markdown, rows, where)
    print(f"{hardware_line(where)}\n{text_table(rows)}")


if __name__ == "__main__":
    main()
