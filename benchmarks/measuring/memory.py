"""Peak memory of a contender: the most bytes of tensors that are alive at once while it trains.

Each contender is measured alone, from before its network is built until after a whole interval and the next meta-step.

On CUDA the caching allocator keeps the peak. On the CPU it is read from a trace of torch's profiler, which sees every
allocation and release of torch's own allocator, temporaries of the backward pass included, and gives the same number
on every run. The alternatives are worse: the resident set of a process depends on what malloc keeps and what other
contenders left behind, and a dispatch mode sees only the tensors that operators return.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from .contenders import Contender
from .timing import Runner
from .workloads import Workload


def peak_memory(build: Callable[[nn.Module], Contender], workload: Workload, device: torch.device) -> int:
    """Return the peak in bytes."""
    gc.collect()
    if device.type == "cuda":
        # The first run on a device also allocates workspaces of cuBLAS and cuDNN, which then stay for all.
        _train(build, workload, device)
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _train(build, workload, device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _train(build, workload, device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return _peak([event for event in events if event["name"] == "[memory]"])


def _train(build: Callable[[nn.Module], Contender], workload: Workload, device: torch.device) -> None:
    runner = Runner(build, workload, device, fresh_batches=True)
    runner.run(runner.contender.interval + 1)


def _peak(events: list[dict]) -> int:
    alive = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        alive += event["args"]["Bytes"]
        peak = max(peak, alive)
    return peak
