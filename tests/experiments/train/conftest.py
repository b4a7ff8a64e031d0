from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from tests.experiments.train import tiny


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put the tiny recipe and methods in place of the real ones; tests may add their own."""
    modules = tiny.stand_ins()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(
        recipes=modules["apo_experiments.recipes"].RECIPES, methods=modules["apo_experiments.methods"].METHODS
    )
