"""Nobody reads what a command prints, as after `| head -1`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from apo_experiments import records
from apo_experiments.cli import main


@pytest.fixture
def unread(monkeypatch):
    """Let standard output and standard error be pipes that nobody reads any more."""
    streams = []
    for name in ("stdout", "stderr"):
        reader, writer = os.pipe()
        os.close(reader)
        streams.append(os.fdopen(writer, "w", buffering=1))
        monkeypatch.setattr(sys, name, streams[-1])
    yield
    monkeypatch.undo()
    for stream in streams:
        stream.close()  # as at exit: the rest that was not written must not fail then


def test_runs_go_on_to_their_end_and_their_exit_code(unread):
    words = ["run", "little-mlp", "--scale", "smoke", "--json", "summary.json"]
    assert main(words) == 0
    assert [record.finished for record in records.find(Path("runs"))] == [True, True]
    assert len(json.loads(Path("summary.json").read_text())) == 2
    assert main([*words, "--set", "lr=1e30"]) == 1  # it diverges
    assert main(["run", "litle-mlp"]) == 2


def test_a_command_that_only_prints_is_content(unread):
    assert main(["list"]) == 0
