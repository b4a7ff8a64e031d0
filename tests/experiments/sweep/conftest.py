from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.experiments.stand_ins import installed
from tests.experiments.sweep import tiny

from apo_experiments.recipes import RECIPES


@pytest.fixture(autouse=True)
def registries() -> Iterator[dict]:
    """Put the tiny recipe and method in place of the real ones, and return the recipes."""
    with installed(tiny.RECIPES, tiny.METHODS):
        yield RECIPES


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which runs note that they are trained."""
    path = tmp_path / "log"
    path.touch()
    monkeypatch.setenv("TINY_LOG", str(path))
    return path
