"""Small float64 networks with everything that a meta-step could get wrong, and batches for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


def norm_and_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),  # a bias before BatchNorm would have no gradient at all
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Dropout2d(0.2),
        nn.Conv2d(4, 2, 2),
        nn.Flatten(),
        nn.Linear(2 * 3 * 3, 3),
    )


def embeddings() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Dropout(0.2), nn.LayerNorm(12), nn.Linear(12, 3))


def matrices_only() -> nn.Module:
    """What Muon takes: no parameter that is not a matrix."""
    return nn.Sequential(
        nn.Embedding(7, 4),
        nn.Flatten(),
        nn.Linear(12, 5, bias=False),
        nn.BatchNorm1d(5, affine=False),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(5, 3, bias=False),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "norm-and-dropout": (norm_and_dropout, lambda n: torch.randn(n, 4, dtype=torch.float64)),
    "convolutions": (convolutions, lambda n: torch.randn(n, 1, 6, 6, dtype=torch.float64)),
    "embeddings": (embeddings, lambda n: torch.randint(7, (n, 3))),
    "matrices-only": (matrices_only, lambda n: torch.randint(7, (n, 3))),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return NETWORKS[name][0]().to(dtype)


def batches(name: str, count: int, size: int = 8, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Returns batches of three classes."""
    torch.manual_seed(2)
    inputs = [NETWORKS[name][1](size) for _ in range(count)]
    return [(x.to(dtype) if x.is_floating_point() else x, torch.randint(3, (size,))) for x in inputs]


def one_hot_mse(outputs: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(outputs, F.one_hot(target, 3).to(outputs))


def one_hot_bce(outputs: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, F.one_hot(target, 3).to(outputs))
