from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.experiments.cli import registry

from apo_experiments.cli import main


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict:
    """Put the small recipes in place of the real ones, and every file into a folder of the test's own."""
    modules = registry.stand_ins()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APO_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("APO_RUNS", raising=False)
    return modules["apo_experiments.recipes"].RECIPES


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
