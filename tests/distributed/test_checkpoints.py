"""Checkpoints by all processes: exact with as many processes, complete with any other number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.processes import in_processes
from tests.distributed.training import build, outcome, train

from apo.integrations.distributed import latest_checkpoint, load_checkpoint, save_checkpoint

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:torch")]

# Each with its wrapper. The rate's run has optimizer state, the Kronecker runs have momentum, a warm-up and factors,
# and that in the eigenbasis has statistics.
KINDS = [("rate", "ddp"), ("adam_rate", "fsdp"), ("kronecker", "fsdp"), ("warmed_kronecker", "ddp")]
KINDS += [("shared_eigenbasis", "ddp")]


def _state(tuner) -> dict[str, Any]:
    """Return everything that a checkpoint must bring back, whatever the number of processes."""
    state = outcome(tuner)
    state.pop("factor_bytes")
    return state | {"steps": tuner.steps, "meta": _meta_state(tuner), "lr": list(tuner.rule.rates())}


def _meta_state(tuner) -> float:
    """Return a number that depends on the whole state of the meta-optimizer."""
    values = [v.double().square().sum() for s in tuner.rule.meta_optimizer.state.values() for v in s.values()]
    total = torch.stack(values).sum() if values else torch.zeros((), dtype=torch.float64)
    if tuner.rule.split:
        torch.distributed.all_reduce(total)
    return float(total)


def _save(folder: str) -> dict[str, Any]:
    """Train to step 12, save, train on to step 24."""
    results = {}
    for rule, wrapper in KINDS:
        tuner = build(rule, wrapper, interval=4)
        train(tuner, 0, 12)
        save_checkpoint(tuner, f"{folder}/{rule}-{wrapper}/step-12", extra={"step": 12})
        results[f"{rule}-{wrapper}"] = [_state(tuner)]
        train(tuner, 12, 24)
        results[f"{rule}-{wrapper}"].append(_state(tuner))
    return results


def _load(folder: str, wrapper_here: str | None) -> dict[str, Any]:
    results = {}
    for rule, wrapper in KINDS:
        torch.manual_seed(99)
        tuner = build(rule, wrapper_here or wrapper, interval=4)
        path = latest_checkpoint(f"{folder}/{rule}-{wrapper}")
        assert path is not None and load_checkpoint(tuner, path) == {"step": 12}
        results[f"{rule}-{wrapper}"] = [_state(tuner)]
        train(tuner, 12, 24)
        results[f"{rule}-{wrapper}"].append(_state(tuner))
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, in_processes(2, folder / "processes", _save, str(folder))[0]


def test_two_processes_go_on_exactly_where_two_were(saved, tmp_path):
    folder, expected = saved
    found = in_processes(2, tmp_path, _load, str(folder), None)
    for kind, states in expected.items():
        for mine in found:
            torch.testing.assert_close(mine[kind], states, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1, 4])
def test_one_and_four_processes_load_what_two_have_saved(saved, size, tmp_path):
    folder, expected = saved
    found = [_load(str(folder), "plain")] if size == 1 else in_processes(size, tmp_path, _load, str(folder), None)
    for kind, (loaded, _) in expected.items():
        for mine in found:
            for name in ("weights", "phi", "records", "lr", "steps"):
                torch.testing.assert_close(mine[kind][0][name], loaded[name], rtol=0, atol=0)
            assert mine[kind][0]["meta"] == pytest.approx(loaded["meta"], rel=1e-12)
            # Every process's part of B' is lost with another number of processes, so what follows is merely close.
            torch.testing.assert_close(mine[kind][1]["weights"], expected[kind][1]["weights"], rtol=0, atol=0.05)


def test_a_checkpoint_of_another_rule_is_refused_with_what_is_missing(saved):
    folder, _ = saved
    tuner = build("kronecker", "plain")
    with pytest.raises(ValueError, match=r"without 'factors/0\.weight/A'"):
        load_checkpoint(tuner, folder / "rate-ddp" / "step-12")


def test_a_checkpoint_that_was_not_finished_is_not_the_latest(saved, tmp_path):
    folder, _ = saved
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "__0_0.distcp").touch()
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(folder / "rate-ddp") == folder / "rate-ddp" / "step-12"
