"""Loops that cannot train, and networks that are turned into something else while they do."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from tests.loops.loop import digit_batches, mlp
from torch import nn

import apo


def attached(model):
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    apo.attach(optimizer, model, criterion)
    return optimizer, criterion


@pytest.mark.parametrize("slip", ["no backward", "frozen"])
def test_a_loop_without_gradients_is_told_so_once(slip):
    model = mlp().requires_grad_(slip != "frozen")
    optimizer, criterion = attached(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", apo.ApoWarning)
        for x, y in digit_batches(5):
            optimizer.zero_grad()
            loss = criterion(model(x.requires_grad_()), y)
            if slip == "frozen":
                loss.backward()
            optimizer.step()
    assert [str(warning.message).count("no parameter of the optimizer has a gradient") for warning in caught] == [1]


def test_scripting_a_watched_network_is_refused_with_what_to_do():
    model = mlp()
    _kept = attached(model)  # hooks come off with the optimizer
    with pytest.raises(AttributeError, match=r"scripted while apo is attached.*copy\.deepcopy\(model\)"):
        torch.jit.script(model)
    torch.jit.script(copy.deepcopy(model))


def test_a_scripted_network_is_refused_with_what_to_do():
    with pytest.raises(TypeError, match=r"model must be a module that can be watched, got a scripted one"):
        attached(torch.jit.script(mlp()))
