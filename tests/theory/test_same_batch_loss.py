"""Appendix D: a loss term on another batch than the step's lowers the rate that the meta-objective prefers.

On a noisy quadratic the rate that is best for the step's own batch is that of the noiseless problem; on another batch
the noise of the step is only a cost, and the preferred rate shrinks (short-horizon bias).
"""

import torch
from tests.theory.problem import normal
from torch import nn

from apo.reference import batch_gradient, unrolled_meta_gradient

CURVATURE = 2.0


class Weights(nn.Module):
    """A vector that is its own output."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(0.3 * torch.ones(20, dtype=torch.float64))

    def forward(self, noise):
        return self.w + noise


def quadratic(outputs, target):
    return CURVATURE / 2 * (outputs - target).square().sum()


def preferred_rate(loss_noise_seed):
    """Bisect for the zero of dQ/d lr, averaged over many noisy batches."""
    model, target = Weights(), torch.zeros(20, dtype=torch.float64)

    def meta_gradient(rate):
        total = 0.0
        for seed in range(20):
            noise = 0.5 * normal(20, seed=seed)
            gradient = batch_gradient(model, loss=quadratic, batch=(noise, target))["w"]
            _, found = unrolled_meta_gradient(
                model,
                lambda theta, phi, g=gradient: {"w": theta["w"] - phi["lr"] * g},
                {"lr": torch.tensor(rate, dtype=torch.float64)},
                loss=quadratic,
                batch=(0.5 * normal(20, seed=seed + loss_noise_seed), target),
                fsd_batch=None,
                discrepancy=None,
                fsd_weight=0.0,
                wsd_weight=0.0,
            )
            total += found["lr"].item()
        return total

    low, high = 0.0, 2.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if meta_gradient(middle) < 0 else (low, middle)
    return (low + high) / 2


def test_the_same_batch_prefers_the_rate_of_the_noiseless_problem():
    assert abs(preferred_rate(0) - 1 / CURVATURE) < 2e-3


def test_another_batch_prefers_a_much_lower_rate():
    # In expectation: signal / (signal + noise) of the noiseless rate, with signal 0.09 and noise 0.25 a coordinate.
    expected = 0.09 / (0.09 + 0.25) / CURVATURE
    found = preferred_rate(1000)
    assert abs(found - expected) < 0.1
    assert found < 0.5 * preferred_rate(0)
