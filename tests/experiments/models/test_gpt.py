"""The GPT sees the past only."""

from __future__ import annotations

import pytest
import torch

from apo_experiments.models.gpt import GPT


def test_a_later_character_changes_no_earlier_guess():
    torch.manual_seed(0)
    model = GPT(11, context=6, layers=2, dimension=8, heads=2).eval()
    text = torch.randint(11, (1, 6))
    changed = text.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 11
    before, after = model(text), model(changed)
    assert torch.equal(before[:4], after[:4]) and not torch.allclose(before[4:], after[4:])


def test_a_dimension_that_does_not_fit_the_heads_is_refused():
    with pytest.raises(ValueError, match="dimension must be a multiple of heads"):
        GPT(11, dimension=10, heads=4)
