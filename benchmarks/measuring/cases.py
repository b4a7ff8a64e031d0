"""The cases by name, and how one workload is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

import apo

from .contenders import AttachedRate, Bare, Contender, LearnedRate, PreconditionedRule
from .memory import peak_memory
from .results import Row
from .rivals import HAS_TORCHOPT, Floor, TorchOpt, Unrolled
from .second_order import HAS_PYTORCH_OPTIMIZER, Kfac, Shampoo, Soap
from .timing import Runner, compare, interleaved_times
from .workloads import Workload

Builder = Callable[[nn.Module], Contender]

CASES: dict[str, Builder] = {
    "lr-k10": partial(LearnedRate, interval=10),
    "lr-k100": partial(LearnedRate, interval=100),
    "lr-k10-attach": partial(AttachedRate, interval=10),
    "kron-k10": partial(PreconditionedRule, interval=10),
    "lr-k10-unrolled": partial(Unrolled, interval=10),
    "lr-k10-torchopt": partial(TorchOpt, interval=10),
    "lr-k10-floor": partial(Floor, interval=10),
    "lr-k1": partial(LearnedRate, interval=1),
    "lr-k1-unrolled": partial(Unrolled, interval=1),
    "lr-k1-torchopt": partial(TorchOpt, interval=1),
    "lr-k1-floor": partial(Floor, interval=1),
    "lr-k10-graph": partial(LearnedRate, interval=10, cuda_graph=True),
    "kron-k10-tf32": partial(PreconditionedRule, interval=10, matmul="tf32"),
    "kron-k10-bf16": partial(PreconditionedRule, interval=10, matmul="bfloat16"),
    "kron-k10-factored": partial(PreconditionedRule, interval=10, conv="factored"),
    "kron-k10-factored-tf32": partial(PreconditionedRule, interval=10, conv="factored", matmul="tf32"),
    "kron-k10-factored-bf16": partial(PreconditionedRule, interval=10, conv="factored", matmul="bfloat16"),
    "kron-k10-factored-tf32-graph": partial(
        PreconditionedRule, interval=10, cuda_graph=True, conv="factored", matmul="tf32"
    ),
    "eigen-k10": partial(PreconditionedRule, interval=10, structure=apo.Eigenbasis),
    "eigen-k10-tf32": partial(PreconditionedRule, interval=10, structure=apo.Eigenbasis, matmul="tf32"),
    "eigen-k10-tf32-graph": partial(
        PreconditionedRule, interval=10, structure=apo.Eigenbasis, cuda_graph=True, matmul="tf32"
    ),
    "kfac-k10": partial(Kfac, interval=10),
    "shampoo-k10": partial(Shampoo, interval=10),
    "soap-k10": partial(Soap, interval=10),
}
#: Cases that only say something on a large convolutional network.
_LARGE = {name for name in CASES if name.startswith(("kron-k10-", "eigen-k10-"))}
_LARGE |= {"lr-k10-graph", "kfac-k10", "shampoo-k10", "soap-k10"}
#: Those that a small one tells as well, in less time.
_SMALL = {name for name in CASES if name.startswith(("lr-k100", "lr-k1-")) or name.endswith(("unrolled", "torchopt"))}
_SMALL |= {"lr-k1"}
#: Cases that need a package which is not there, with the line that says so.
_PACKAGES = {
    "torchopt": (HAS_TORCHOPT, ("lr-k10-torchopt", "lr-k1-torchopt")),
    "pytorch-optimizer": (HAS_PYTORCH_OPTIMIZER, ("shampoo-k10", "soap-k10")),
}
MISSING = {
    name: f"{package} is not installed: pip install 'apo-optim[bench]'"
    for package, (there, names) in _PACKAGES.items()
    if not there
    for name in names
}


def cases_for(workload: Workload) -> list[str]:
    """Return the cases that are measured on a workload.

    Example:
        >>> from .workloads import CPU_WORKLOADS
        >>> "kfac-k10" in cases_for(CPU_WORKLOADS[0])
        False
    """
    others = _SMALL if workload.large else _LARGE
    return [name for name in CASES if name not in others]


def measure(
    workload: Workload, cases: Iterable[str], device: torch.device, repeats: int, clock: Callable[[], float]
) -> list[Row]:
    """Measure some cases of a workload against the bare optimizer."""
    builders: dict[str, Builder] = {"bare": Bare} | {name: CASES[name] for name in cases}
    memory = {name: peak_memory(build, workload, device) for name, build in builders.items()}
    runners = {name: Runner(build, workload, device) for name, build in builders.items()}
    times = interleaved_times(runners, repeats, clock)
    bare = compare(times["bare"], times["bare"], 1)
    rows = []
    for name in builders:
        if name == "bare":
            continue
        interval = runners[name].contender.interval
        timing = compare(times[name], times["bare"], interval)
        rows.append(
            Row(
                case=f"{workload.name}/{name}",
                ratio=timing.ratio,
                spread=timing.spread,
                peak_memory_ratio=memory[name] / memory["bare"],
                meta_step_ratio=(timing.ratio - 1) * interval,
                step_seconds=timing.step_seconds,
                bare_step_seconds=bare.step_seconds,
                peak_memory_bytes=memory[name],
                bare_peak_memory_bytes=memory["bare"],
                repeats=repeats,
            )
        )
    return rows
