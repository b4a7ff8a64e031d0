"""Vectors of DTensors: every operation gives what it gives on whole tensors, also on a mesh that replicates shards."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.processes import in_processes
from torch import Tensor

from apo.distributed import Processes, is_sharded, shard_like, whole
from apo.vectors import advance_, assign_, copies, differences, dot, norm, scaled

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _vectors() -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 3), (4,), (1, 2)]  # which four processes cannot share evenly
    left = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return left, [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _results(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    moved = [tensor.clone() for tensor in left]
    advance_(moved, right, -0.5)
    assigned = [torch.zeros_like(tensor) for tensor in left]
    assign_(assigned, right)
    return [
        dot(left, right),
        norm(left),
        *moved,
        *assigned,
        *copies(left),
        *scaled(left, 2.0),
        *differences(left, right),
    ]


def _sharded_results() -> dict[str, list[Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    results = {}
    meshes = {"line": ((4,), [Shard(0)]), "grid": ((2, 2), [Replicate(), Shard(0)])}
    for name, (shape, placements) in meshes.items():
        mesh = init_device_mesh("cpu", shape)
        left, right = ([distribute_tensor(t, mesh, placements) for t in vector] for vector in _vectors())
        found = _results(left, right)
        assert is_sharded(left[0]) and not is_sharded(found[0]) and not is_sharded(found[1])
        results[name] = [whole(tensor) for tensor in found]
        whole_again = shard_like(whole(left[0]), left[0])
        assert torch.equal(whole_again.to_local(), left[0].to_local())
        everyone = Processes.of(None, left)
        rank = float(torch.distributed.get_rank())
        assert everyone.gather(torch.tensor([rank])).flatten().sort().values.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert everyone.agree(torch.tensor(rank)) == 1.5
    return results


def test_operations_on_shards_give_what_they_give_on_whole_tensors(tmp_path):
    expected = _results(*_vectors())
    for results in in_processes(4, tmp_path, _sharded_results):
        for found in results.values():
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
