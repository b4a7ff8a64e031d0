"""Several processes train as one process with the same global batch does."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.distributed.processes import in_processes
from tests.distributed.training import RULES, build, outcome, train

pytestmark = pytest.mark.distributed

STEPS = 200
TOLERANCE = 1e-6


def _train_all(wrappers: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    results = {}
    for wrapper in wrappers:
        for rule in RULES:
            tuner = build(rule, wrapper)
            train(tuner, 0, STEPS)
            results[f"{rule}-{wrapper}"] = outcome(tuner)
            tuner.detach()
    return results


@pytest.fixture(scope="module")
def one_process():
    return _train_all(("plain",))


@pytest.fixture(scope="module", params=[2, 4])
def many_processes(request, tmp_path_factory):
    return in_processes(request.param, tmp_path_factory.mktemp("processes"), _train_all, ("ddp", "fsdp"))


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("rule", RULES)
def test_weights_and_phi_are_those_of_one_process_with_the_same_global_batch(
    many_processes, one_process, rule, wrapper
):
    expected = one_process[f"{rule}-plain"]
    assert len(expected["records"]) == STEPS // 5
    for found in (results[f"{rule}-{wrapper}"] for results in many_processes):
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(found["phi"], expected["phi"], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(
            torch.tensor(found["records"]), torch.tensor(expected["records"]), rtol=1e-3, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_every_process_writes_the_same_records_to_the_last_bit(many_processes, wrapper):
    for rule in RULES:
        first, *others = (results[f"{rule}-{wrapper}"]["records"] for results in many_processes)
        assert all(other == first for other in others)


@pytest.mark.slow
def test_training_got_somewhere(one_process):
    for result in one_process.values():
        assert result["records"][-1][0] < 0.5 * result["records"][0][0]
    assert os.environ.get("RANK") is None  # what stands for one process is one
