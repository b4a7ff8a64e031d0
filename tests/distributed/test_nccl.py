"""On a GPU: one process under DistributedDataParallel or fully_shard with NCCL trains as one without them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.distributed.training import RULES, network, share_of_batch, weights, wrap

import apo

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]
DEVICE, BACKEND = "cuda", "nccl"


@pytest.fixture(autouse=True)
def _one_process():
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _train(rule: str, wrapper: str, door: str) -> tuple[list[torch.Tensor], list[float]]:
    model = wrap(network().to(DEVICE), wrapper)
    criterion = torch.nn.MSELoss()
    explicit = apo.APO(RULES[rule](model), model, criterion=F.mse_loss) if door == "explicit" else None
    tuner = explicit or apo.attach(RULES[rule](model), model, criterion)
    for step in range(60):
        x, y = (tensor.to(DEVICE) for tensor in share_of_batch(step))
        if explicit is not None:
            explicit.step(x, y)
        else:
            tuner.optimizer.zero_grad()
            criterion(model(x), y).backward()
            tuner.optimizer.step()
    return weights(model), tuner.history.column("objective")


@pytest.mark.parametrize("wrapper, door", [("ddp", "explicit"), ("ddp", "attach"), ("fsdp", "explicit")])
@pytest.mark.parametrize("rule", RULES)
def test_nccl_trains_as_a_plain_network_does(rule, wrapper, door):
    expected, objectives = _train(rule, "plain", "explicit")
    found, seen = _train(rule, wrapper, door)
    assert len(seen) == 6 or rule == "warmed_kronecker"
    assert seen == pytest.approx(objectives, rel=1e-3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
