"""A recording that fails is reported, and the work continues without it."""

from __future__ import annotations

import pytest

import apo
from apo.passes.graphs import recorded


def test_what_cannot_be_recorded_runs_eagerly_with_one_sentence():
    def fails():
        raise RuntimeError("operation not permitted\nwith details")

    sentence = "^the network cannot be a CUDA graph and runs eagerly: operation not permitted$"
    with pytest.warns(apo.ApoWarning, match=sentence):
        assert recorded("the network", fails) is None
