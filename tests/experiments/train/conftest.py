from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tests.experiments.stand_ins import installed
from tests.experiments.train import tiny

from apo_experiments.methods import METHODS
from apo_experiments.recipes import RECIPES


@pytest.fixture(autouse=True)
def registries() -> Iterator[SimpleNamespace]:
    """Put the tiny recipe and methods in place of the real ones; tests may add their own."""
    with installed(tiny.RECIPES, tiny.METHODS):
        yield SimpleNamespace(recipes=RECIPES, methods=METHODS)
