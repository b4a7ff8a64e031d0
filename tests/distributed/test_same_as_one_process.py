"""Several processes train as one process with the same global batch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.processes import in_processes
from tests.distributed.training import RULES, build, outcome, train

pytestmark = pytest.mark.distributed

STEPS = 200
TOLERANCE = 1e-6
TOLERANCES = {"shared_eigenbasis": 1e-9}  # in double


# Four processes under fully_shard are slow on a small machine: they do without the variations.
CASES = {
    "2 processes, ddp": (2, "ddp", tuple(RULES)),
    "4 processes, ddp": (4, "ddp", tuple(RULES)),
    "2 processes, fsdp": (2, "fsdp", ("rate", "adam_rate", "kronecker")),
    "2 processes, fsdp, warm-up": (2, "fsdp", ("warmed_kronecker",)),
    "2 processes, fsdp, eigenbasis": (2, "fsdp", ("shared_eigenbasis",)),
    "4 processes, fsdp, rate": (4, "fsdp", ("rate",)),
    "4 processes, fsdp, kronecker": (4, "fsdp", ("kronecker",)),
}


def _train_all(wrapper: str, rules: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    results = {}
    for rule in rules:
        tuner = build(rule, wrapper)
        train(tuner, 0, STEPS)
        results[rule] = outcome(tuner)
        tuner.detach()
    return results


@pytest.fixture(scope="module")
def one_process():
    return _train_all("plain", tuple(RULES))


@pytest.mark.slow
@pytest.mark.parametrize("size, wrapper, rules", CASES.values(), ids=CASES)
def test_weights_and_phi_are_those_of_one_process_with_the_same_global_batch(
    one_process, size, wrapper, rules, tmp_path
):
    found = in_processes(size, tmp_path, _train_all, wrapper, rules)
    for rule in rules:
        _check_same(one_process[rule], [results[rule] for results in found], TOLERANCES.get(rule, TOLERANCE))


def _train_measured(wrapper: str) -> dict[str, Any]:
    tuner = build("measured_rate", wrapper)
    train(tuner, 0, STEPS)
    assert tuner.rule.compares
    return {"rates": tuner.history.column("lr/0"), "phi": float(tuner.rule.phi()[0])}


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_rate_that_compares_batches_is_the_same_on_all_processes_and_nearly_that_of_one(wrapper, tmp_path):
    alone, (first, second) = _train_measured("plain"), in_processes(2, tmp_path, _train_measured, wrapper)
    assert first == second
    assert first["rates"] == pytest.approx(alone["rates"], rel=0.02)


def _fisher_statistics(wrapper: str) -> dict[str, Any]:
    tuner = build("fisher_eigenbasis", wrapper)
    train(tuner, 0, 31)
    return {
        f"{layer.name}/{key}": tensor.clone()
        for layer in tuner.optimizer.layers
        for key, tensor in layer.block.tensors.items()
        if not tensor.is_meta
    }


def test_gradients_at_sampled_targets_are_averaged_over_the_processes(tmp_path):
    first, second = in_processes(2, tmp_path / "ddp", _fisher_statistics, "ddp")
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    shared = in_processes(2, tmp_path / "fsdp", _fisher_statistics, "fsdp")
    torch.testing.assert_close(shared[0] | shared[1], first, rtol=1e-3, atol=1e-4)


def _train_to_the_end(wrapper: str) -> dict[str, Any]:
    tuner = build("rate", wrapper, total_steps=STEPS)
    train(tuner, 0, STEPS)
    share = tuner.objective.share(tuner.history[-1].step)
    assert share > 0.8  # most of the loss term is the mean over the other batches
    return outcome(tuner)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_processes_that_know_the_end_of_training_go_there_as_one_does(one_process, wrapper, tmp_path):
    alone = _train_to_the_end("plain")
    assert alone["records"] != one_process["rate"]["records"]
    _check_same(alone, in_processes(2, tmp_path, _train_to_the_end, wrapper))


def _check_same(expected: dict[str, Any], outcomes: list[dict[str, Any]], tolerance: float = TOLERANCE) -> None:
    assert len(expected["records"]) == STEPS // 10
    assert all(found["records"] == outcomes[0]["records"] for found in outcomes)  # to the last bit
    for found in outcomes:
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=tolerance)
        torch.testing.assert_close(found["phi"], expected["phi"], rtol=0, atol=tolerance)
        torch.testing.assert_close(
            torch.tensor(found["records"]), torch.tensor(expected["records"]), rtol=1e-3, atol=1e-5
        )


def test_training_got_somewhere(one_process):
    for result in one_process.values():
        assert result["records"][-1][0] < 0.5 * result["records"][0][0]
