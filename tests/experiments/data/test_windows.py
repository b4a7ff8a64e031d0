"""Windows of a text: each character once an epoch, and the same ones after a restart."""

from __future__ import annotations

import pytest
import torch

from apo_experiments.data.streams import WindowBatches


def stream(seed: int = 0) -> WindowBatches:
    return WindowBatches(torch.arange(500), context=7, batch_size=5, seed=seed)


def test_no_character_comes_twice_in_an_epoch_and_epochs_differ():
    batches = stream()
    epochs = [torch.cat([batches.next()[0].flatten() for _ in range(batches.steps_per_epoch)]) for _ in range(2)]
    assert all(len(epoch.unique()) == len(epoch) == 7 * 5 * batches.steps_per_epoch for epoch in epochs)
    assert not torch.equal(*epochs)


def test_targets_are_the_next_characters():
    inputs, targets = stream().next()
    assert torch.equal(inputs.flatten() + 1, targets)


def test_it_resumes_in_the_middle_of_an_epoch():
    batches, again = stream(), stream(seed=3)
    for _ in range(17):
        batches.next()
    again.load_state_dict(batches.state_dict())
    for _ in range(20):
        assert all(map(torch.equal, batches.next(), again.next()))


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="batch_size must leave a batch of windows of 7 characters"):
        WindowBatches(torch.arange(40), context=7, batch_size=5, seed=0)
