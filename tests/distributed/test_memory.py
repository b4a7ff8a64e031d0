"""Shared blocks: factor memory falls with the number of processes, and the blocks are shared fairly."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.processes import in_processes
from tests.distributed.training import wide_network, wrap

import apo
from apo.preconditioners.ownership import balanced


def _factor_bytes(structure: str, wrapper: str, distribute: bool | None) -> tuple[int, int]:
    model = wrap(wide_network(), wrapper)
    rule = apo.Preconditioned(getattr(apo, structure)(model, lr=0.1, distribute=distribute))
    tuner = apo.APO(rule, model, criterion=torch.nn.functional.mse_loss)
    tuner.step(torch.randn(4, 16), torch.randn(4, 3))
    held = {t.data_ptr(): t for layer in rule.optimizer.layers for t in layer.block.tensors.values() if not t.is_meta}
    learned = [t for state in rule.meta_optimizer.state.values() for t in state.values()]
    return _bytes(held.values()), _bytes(learned)


def _bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _both(structure: str) -> dict[str, tuple[int, int]]:
    shared, sharded = _factor_bytes(structure, "ddp", True), _factor_bytes(structure, "fsdp", None)
    return {"ddp": shared, "fsdp": sharded, "ddp, not shared": _factor_bytes(structure, "ddp", None)}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("structure", ["Kronecker", "Eigenbasis"])
def test_each_of_four_processes_keeps_at_most_0_35_of_the_blocks_and_of_what_learns_them(structure, tmp_path):
    factors, learned = _factor_bytes(structure, "plain", None)
    for result in in_processes(4, tmp_path, _both, structure):
        for case in ("ddp", "fsdp"):
            assert result[case][0] <= 0.35 * factors
            assert result[case][1] <= 0.35 * learned
        assert result["ddp, not shared"] == (factors, learned)


def test_the_most_loaded_worker_has_little_more_than_its_share():
    costs = [float(cost) for cost in torch.randint(1, 100, (40,))]
    workers = balanced(costs, 4)
    loads = [sum(cost for cost, worker in zip(costs, workers, strict=True) if worker == w) for w in range(4)]
    assert max(loads) < 1.1 * sum(costs) / 4


def test_more_workers_than_tasks_leaves_some_idle():
    assert sorted(balanced([3.0, 1.0], 4)) == [0, 1]
