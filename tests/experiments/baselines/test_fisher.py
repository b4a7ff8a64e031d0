"""Scores of drawn targets have the Fisher information as their second moment."""

from __future__ import annotations

import pytest
import torch

from apo_experiments.baselines.fisher import sampled_score

DRAWS = 40_000


@pytest.mark.parametrize(
    ("kind", "fisher"),
    [
        ("categorical", lambda z: torch.diag(z.softmax(0)) - torch.outer(z.softmax(0), z.softmax(0))),
        ("bernoulli", lambda z: torch.diag(z.sigmoid() * (1 - z.sigmoid()))),
        ("gaussian", lambda z: torch.eye(3, dtype=z.dtype)),
    ],
)
def test_second_moment_of_the_score_is_the_fisher_information_of_the_output(kind, fisher):
    z = torch.tensor([0.5, -1.0, 1.5], dtype=torch.float64)
    scores = sampled_score(z.expand(DRAWS, 3), kind, torch.Generator().manual_seed(0))
    torch.testing.assert_close(scores.mean(0), torch.zeros(3, dtype=torch.float64), atol=0.02, rtol=0)
    torch.testing.assert_close(scores.T @ scores / DRAWS, fisher(z), atol=0.02, rtol=0)


def test_generator_decides_the_draw_and_the_global_stream_is_left_alone():
    z = torch.randn(50, 4)
    before = torch.get_rng_state()
    first = sampled_score(z, "categorical", torch.Generator().manual_seed(1))
    again = sampled_score(z, "categorical", torch.Generator().manual_seed(1))
    other = sampled_score(z, "categorical", torch.Generator().manual_seed(2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match="poisson"):
        sampled_score(torch.zeros(2, 2), "poisson")
