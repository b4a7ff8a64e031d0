"""Which losses of a step are micro-batches of one mean, and which are terms of a sum."""

from __future__ import annotations

import pytest
import torch

from apo.core.batches import are_terms, sizes_of
from apo.passes.recording import Autocast, Call, Recording


def losses(*weights, calls=None):
    calls = calls or [Call((torch.zeros(2),), {}) for _ in weights]
    autocast = Autocast.capture("cpu")
    return [Recording((call,), (), {}, (), autocast, weight=w) for call, w in zip(calls, weights, strict=True)]


@pytest.mark.parametrize("weight", [0.25, torch.tensor(0.25), torch.full((8,), 0.25 / 8)])
def test_losses_that_each_count_as_one_of_n_are_micro_batches(weight):
    """Numbers, tensors as a device keeps them, and the weights of the elements of a loss without reduction."""
    recordings = losses(*[weight] * 4)
    assert sizes_of(recordings) == pytest.approx([0.25] * 4)
    assert not are_terms(recordings, sizes_of(recordings))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.9, 0.1), (torch.tensor(1.0), torch.tensor(0.1))])
def test_other_weights_are_those_of_terms(weights):
    recordings = losses(*weights)
    assert are_terms(recordings, sizes_of(recordings))


def test_losses_on_one_output_are_terms_whatever_their_weights():
    call = Call((torch.zeros(2),), {})
    assert are_terms(losses(0.5, 0.5, calls=[call, call]), [0.5, 0.5])
    assert not are_terms(losses(0.5), [1.0])
