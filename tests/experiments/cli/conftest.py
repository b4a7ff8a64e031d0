from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.experiments.cli import registry
from tests.experiments.stand_ins import installed

from apo_experiments.cli import main
from apo_experiments.recipes import RECIPES


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict]:
    """Put the small recipes in place of the real ones, and every file into a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APO_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("APO_RUNS", raising=False)
    with installed(registry.RECIPES, registry.METHODS):
        yield RECIPES


@pytest.fixture
def apo(capfd: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Return a function that carries out a command and returns its exit code and what it printed."""

    def command(*words: str) -> SimpleNamespace:
        try:
            code = main(words)
        except SystemExit as exit:
            code = exit.code
        printed = capfd.readouterr()
        return SimpleNamespace(code=code, out=printed.out, err=printed.err)

    return command
