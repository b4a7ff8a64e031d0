"""Where the end is known, a learned rate falls towards it as far as the noise of the gradients asks for.

Noisy and ill-conditioned linear regression. The loss on the step's own batch keeps the rate at that of the noiseless
problem, and the weights keep moving about the solution. The loss on another batch from the beginning (appendix D)
gives the rate up at once to settle the directions of high curvature, and never gets anywhere along the others. With
``total_steps`` the first half is the one and the end is the other.
"""

import statistics

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import apo

STEPS = 500  # shorter runs rise faster, whether the rate falls in the end or not
SEEDS = (0, 1, 2)
SCALES = torch.logspace(0, -1, 8, dtype=torch.float64)  # of the inputs, so the curvature has a condition number of 100


def regression(seed, noise=1.0, **options):
    """Returns the learned rate before the middle and at the end, without the linear factor, and the risk at the end."""
    generator = torch.Generator().manual_seed(seed + 100)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    model = nn.Linear(8, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    solution = normal(8) / SCALES
    rule = apo.LearningRate(torch.optim.SGD(model.parameters(), lr=0.05), warm_start=False, over_relaxation=1.0)
    tuner = apo.APO(rule, model, criterion=F.mse_loss, fsd_weight=0.1, interval=1, **options)
    rates, risks = [], []
    for _ in range(STEPS):
        x = normal(8, 8) * SCALES
        tuner.step(x, (x @ solution + noise * normal(8)).unsqueeze(1))
        rates.append(rule.learned_rates()[0])
        risks.append(float(((model.weight.detach()[0] - solution) * SCALES).square().sum()))
    middle, end = (statistics.geometric_mean(rates[stop - 20 : stop]) for stop in (STEPS // 2, STEPS))
    return middle, end, statistics.fmean(risks[-20:])


@pytest.fixture(scope="module")
def runs():
    ways = {"unknown": {}, "known": {"total_steps": STEPS}, "greedy": {"other_batch_share": 1.0}}
    return {way: [regression(seed, **options) for seed in SEEDS] for way, options in ways.items()}


def test_a_rate_that_knows_the_end_falls_and_another_does_not(runs):
    for (middle, end, _), (unknown_middle, unknown_end, _) in zip(runs["known"], runs["unknown"], strict=True):
        assert middle == unknown_middle
        assert end < 0.6 * middle
        assert unknown_end > 0.9 * unknown_middle


def test_a_rate_that_knows_the_end_settles_the_noise(runs):
    for (*_, risk), (*_, unknown_risk) in zip(runs["known"], runs["unknown"], strict=True):
        assert risk < 0.5 * unknown_risk


def test_a_rate_that_is_greedy_from_the_beginning_does_not_get_there(runs):
    for (*_, risk), (*_, greedy_risk) in zip(runs["known"], runs["greedy"], strict=True):
        assert risk < 0.5 * greedy_risk


def test_without_noise_the_rate_has_no_reason_to_fall():
    middle, end, _ = regression(0, noise=0.0, total_steps=STEPS)
    assert end > 0.5 * middle
