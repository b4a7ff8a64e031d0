"""Appendix D, through the engine: a loss term on another batch than the step's lowers the rate that is learned.

On the step's own batch the noise of the gradient cannot be seen, and the learned rate is that of the noiseless problem;
on another batch the noise of the step is only a cost, and the greedy rate shrinks towards nothing.
"""

import math
import statistics

import pytest
import torch
from tests.theory.problem import normal
from torch import nn
from torch.nn import functional as F

import apo


def learned_rate(seed, *, ablation, noise=1.0, steps=200):
    """Returns the geometric mean of the rate over the last quarter of a run of noisy linear regression."""
    torch.manual_seed(seed)
    model = nn.Linear(8, 1).double()
    rule = apo.LearningRate(torch.optim.SGD(model.parameters(), lr=0.05), warm_start=False, over_relaxation=1.0)
    tuner = apo.APO(rule, model, criterion=F.mse_loss, fsd_weight=0.1, interval=1, other_batch_share=float(ablation))
    weights = normal(8, 1, seed=0)
    for step in range(steps):
        x, z = normal(8, 8, seed=1000 * seed + 2 * step), normal(8, 1, seed=1000 * seed + 2 * step + 1)
        tuner.step(x, x @ weights + noise * z)
    rates = tuner.history.column("lr/0")[-steps // 4 :]
    return math.exp(statistics.fmean(map(math.log, rates)))


def mean_rate(**options):
    return math.exp(statistics.fmean(math.log(learned_rate(seed, **options)) for seed in range(3)))


@pytest.mark.slow
def test_another_batch_in_the_loss_term_lowers_the_learned_rate():
    assert mean_rate(ablation=True) < 0.3 * mean_rate(ablation=False)


@pytest.mark.slow
def test_without_noise_the_batch_of_the_loss_term_makes_little_difference():
    ratio = mean_rate(ablation=True, noise=0.0) / mean_rate(ablation=False, noise=0.0)
    assert 0.3 < ratio < 3


def test_the_loss_term_is_evaluated_on_the_training_batch_by_default_and_on_the_other_in_the_ablation():
    x, y = normal(6, 8, seed=1), normal(6, 1, seed=2)
    other_x, other_y = normal(6, 8, seed=3), 50 * normal(6, 1, seed=4)
    for ablation, (inputs, target) in {False: (x, y), True: (other_x, other_y)}.items():
        torch.manual_seed(0)
        model = nn.Linear(8, 1).double()
        rule = apo.LearningRate(torch.optim.SGD(model.parameters(), lr=1e-9), warm_start=False)
        tuner = apo.APO(
            rule,
            model,
            criterion=F.mse_loss,
            fsd_batch=[(other_x, other_y)],
            other_batch_share=float(ablation),
        )
        expected = F.mse_loss(model(inputs), target).item()  # the look-ahead goes nowhere
        tuner.step(x, y)
        assert tuner.history[0].look_ahead_loss == pytest.approx(expected, rel=1e-6)
