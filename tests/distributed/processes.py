"""Run a function in several gloo processes on this machine and bring back what each returned."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def _in_process(rank: int, size: int, folder: str, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", category=RuntimeWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        torch.save(function(*args), f"{folder}/result-{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def in_processes(size: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of ``function(*args)`` in ``size`` processes that know each other, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    multiprocessing.spawn(_in_process, (size, str(folder), function, args), nprocs=size, join=True)
    return [torch.load(folder / f"result-{rank}.pt", weights_only=True) for rank in range(size)]
