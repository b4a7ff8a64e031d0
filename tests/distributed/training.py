"""One small training that runs alike in one process, under DistributedDataParallel and under fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import apo
from apo.distributed import whole

GLOBAL_BATCH = 16


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3))


def wide_network() -> nn.Module:
    """Blocks of equal size, so that four processes can share them fairly."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)), nn.Linear(16, 3))


def wrap(model: nn.Module, wrapper: str, **options: Any) -> nn.Module:
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model, **options)
    if wrapper == "fsdp":
        from torch.distributed.fsdp import fully_shard

        # One inner module and the rest: each unit of its own would cost the tests a message per pass.
        fully_shard(next(model.children()), **options)
        fully_shard(model, **options)
    return model


def share_of_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return this process's part of the batch that all of them train on at this step."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(GLOBAL_BATCH, 6, generator=generator)
    teacher = torch.randn(6, 3, generator=torch.Generator().manual_seed(7))
    y = torch.tanh(x @ teacher)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    part = GLOBAL_BATCH // size
    return x[rank * part : (rank + 1) * part], y[rank * part : (rank + 1) * part]


def rate(model: nn.Module) -> apo.Rule:
    """Without the comparison of batches, which reads curvature from differences of float32 losses."""
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-3)
    return apo.LearningRate(sgd, over_relaxation=1.4)


def adam_rate(model: nn.Module) -> apo.Rule:
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-3)
    return apo.LearningRate(adamw, per_group=True, over_relaxation=1.4)


def measured_rate(model: nn.Module) -> apo.Rule:
    """The default."""
    return apo.LearningRate(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))


def kronecker(model: nn.Module, **options: Any) -> apo.Rule:
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.5, "clip": 5.0, "weight_decay": 1e-3}
    return apo.Preconditioned(apo.Kronecker(model, **settings, **options), warm_start=0.5)


def shared_kronecker(model: nn.Module) -> apo.Rule:
    return kronecker(model, distribute=True)


def warmed_kronecker(model: nn.Module) -> apo.Rule:
    """With a warm-up, whose end the guard decides, and shared blocks."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = apo.Kronecker(model, lr=0.05, warmup=sgd, warmup_steps=10, distribute=True)
    return apo.Preconditioned(optimizer)


def shared_eigenbasis(model: nn.Module) -> apo.Rule:
    """With its defaults, and shared blocks."""
    return apo.Preconditioned(apo.Eigenbasis(model, momentum=0.5, weight_decay=1e-3, distribute=True))


def fisher_eigenbasis(model: nn.Module) -> apo.Rule:
    """Whose statistics depend on the number of processes, because each draws its own targets."""
    return apo.Preconditioned(apo.Eigenbasis(model, statistics="fisher"))


RULES: dict[str, Callable[[nn.Module], apo.Rule]] = {
    "rate": rate,
    "adam_rate": adam_rate,
    "kronecker": kronecker,
    "shared_kronecker": shared_kronecker,
    "warmed_kronecker": warmed_kronecker,
    "shared_eigenbasis": shared_eigenbasis,
}

#: Rounding turns a basis between directions in which statistics are nearly equal: in float32 weights of four processes
#: and of one differ by 1.3e-5 after 200 steps, and a fault of that size could not be told from it.
IN_DOUBLE = ("shared_eigenbasis",)


def build(rule: str, wrapper: str, interval: int = 10, total_steps: int | None = None, **options: Any) -> apo.APO:
    model = wrap(network().double() if rule in IN_DOUBLE else network(), wrapper, **options)
    others = {"measured_rate": measured_rate, "fisher_eigenbasis": fisher_eigenbasis}
    chosen = (RULES | others)[rule]
    return apo.APO(chosen(model), model, criterion=F.mse_loss, interval=interval, total_steps=total_steps)


def train(tuner: apo.APO, start: int, stop: int) -> None:
    for step in range(start, stop):
        dtype = next(tuner.model.parameters()).dtype
        tuner.step(*(tensor.to(dtype) for tensor in share_of_batch(step)))


def weights(model: nn.Module) -> list[Tensor]:
    return [whole(p.detach()).clone() for p in model.parameters()]


def all_factors(optimizer: apo.Preconditioner) -> dict[str, Tensor]:
    """Return the factors of all blocks, from whichever process keeps them."""
    mine = {
        f"{layer.name}/{key}": factor.clone()
        for layer in optimizer.layers
        for key, factor in layer.block.factors.items()
        if not factor.is_meta
    }
    if not dist.is_initialized():
        return mine
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: value for factors in everyone for name, value in factors.items()}


def outcome(tuner: apo.APO) -> dict[str, Any]:
    """Return what two trainings must have in common: weights, phi and the records."""
    optimizer = tuner.optimizer
    is_matrix = isinstance(optimizer, apo.Preconditioner)
    phi = all_factors(optimizer) if is_matrix else {str(i): p.clone() for i, p in enumerate(tuner.rule.phi())}
    return {
        "weights": weights(tuner.model),
        "phi": phi,
        "records": [[r.loss, r.objective, r.meta_gradient_norm, *r.lr, *r.summary.values()] for r in tuner.history],
        "factor_bytes": sum(f.numel() * f.element_size() for f in tuner.rule.phi()),
    }
