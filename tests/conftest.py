"""What every test shares: one thread, a fixed seed, float32 as default, and no CUDA tests without CUDA."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
import torch

# Where the tests were started in the background, the shell has told them to ignore Ctrl-C, and their subprocesses too;
# tests of what an interruption does need it to arrive.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    # The networks here are tiny: threads cost more than they give, and make sums depend on the machine.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    # Modules and tests, a million objects, live until the end: without them a collection takes a tenth of the time.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> Iterator[None]:
    """Makes a test independent of those that ran before it."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
