"""What every smoke run needs: a few steps must be enough to pass through all parts of a method."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from apo_experiments.methods import METHODS
from apo_experiments.recipe import Entry

#: Values for a run of a few steps, for those methods that have the hyperparameter.
_SHORT: dict[str, Any] = {
    "interval": 2,
    "warmup_interval": 1,
    "warmup_steps": 2,
    "statistics_interval": 1,
    "inverse_interval": 2,
    "start_step": 2,
    "schedule_warmup": 2,
}

#: Values for one method: PSGD's factors are slow where torch finds no package for the order of tensor products.
_SHORT_OF: dict[str, dict[str, Any]] = {"psgd-kron": {"max_dim": 16}}


def smoke_hyper(entries: Iterable[Entry], keep: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Return hyperparameters for :attr:`Scale.hyper` that make a few steps enough.

    Args:
        entries: The entries of a recipe.
        keep: Hyperparameters that stay as they are, because the recipe is about them.
    """
    short = {name: value for name, value in _SHORT.items() if name not in set(keep)}
    return {
        entry.label: {name: value for name, value in short.items() if name in METHODS[entry.method].defaults}
        | _SHORT_OF.get(entry.method, {})
        for entry in entries
    }
