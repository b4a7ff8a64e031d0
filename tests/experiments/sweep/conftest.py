from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.experiments.sweep import tiny


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Put the tiny recipe and method in place of the real ones, and return the recipes."""
    modules = tiny.stand_ins()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules["apo_experiments.recipes"].RECIPES


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which runs note that they are trained."""
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("TINY_LOG", str(path))
    return path
