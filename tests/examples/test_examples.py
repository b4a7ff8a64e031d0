"""Every example runs in its smallest form and does what it says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Returns a function that imports an example as Python does when it is run as a script."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.mark.parametrize("name", ["one_line", "explicit", "custom_rule"])
def test_example_learns_the_digits_within_a_few_epochs(example, capsys, name):
    accuracy = example(name).main(epochs=4)
    assert accuracy > 0.85
    assert f"test accuracy {accuracy:.1%}" in capsys.readouterr().out


def test_examples_for_newcomers_fit_on_a_screen():
    assert all(len((EXAMPLES / name).read_text().splitlines()) < 60 for name in ("one_line.py", "explicit.py"))


@pytest.mark.slow
def test_quick_demo_prints_tables_and_claims_and_writes_the_figure(example, capsys, tmp_path):
    assert example("demo").main(["--quick", "--processes", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^   1e[-+]\d\d \|", printed, re.MULTILINE)) == 2 * 3
    assert printed.count("HELD") + printed.count("DID NOT HOLD") >= 4
    assert "APO-Precond" in printed and "did not learn" in printed and "diverged" in printed
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_apo_ends_at_the_same_loss_from_initial_rates_eleven_decades_apart(example):
    training = example("demo_training")
    for optimizer in training.OPTIMIZERS:
        runs = [training.train(training.Job(optimizer, rate, True, 0, 4)) for rate in (1e-8, 1e-2, 1e3)]
        assert runs[0].losses[-1] < 0.5
        assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-4)
        assert runs[0].losses == pytest.approx(runs[2].losses, rel=1e-4)
