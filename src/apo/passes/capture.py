"""Recording CUDA graphs without leaving traces where it fails."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from apo.errors import ApoWarning

__all__ = ["capture", "recorded"]

Recorded = TypeVar("Recorded")


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Record what is launched inside into ``graph``.

    Like ``torch.cuda.graph``, with three cares. An old graph that the garbage collector happens to find during a
    recording would break it, so old ones are collected before and none meanwhile. Other threads, such as one that pins
    batches in memory or watches over NCCL, may go on: by default whatever they ask of CUDA would break it, too. And
    where a recording breaks off, torch leaves CUDA's random stream waiting for its end, so that every later draw fails;
    a copy of the stream's state, at the same place, does not wait.

    Args:
        graph: The graph.
        options: Of ``torch.cuda.graph``: ``pool`` and ``stream``.
    """
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
            yield
    except BaseException:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    finally:
        if collecting:
            gc.enable()


def recorded(what: str, record: Callable[[], Recorded]) -> Recorded | None:
    """Return what a function that records graphs returns; None, with a warning, if it cannot be recorded.

    Args:
        what: What is recorded, as the subject of a sentence.
        record: Records it.

    Example:
        >>> recorded("the number", lambda: 3)
        3
    """
    try:
        return record()
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        warnings.warn(f"{what} cannot be a CUDA graph and runs eagerly: {reason}", ApoWarning, stacklevel=3)
        return None
