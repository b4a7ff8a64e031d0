"""From a recipe to its runs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from apo_experiments.errors import UserError
from apo_experiments.methods import METHODS
from apo_experiments.methods.hyper import filled
from apo_experiments.recipe import Entry, Recipe
from apo_experiments.runs import RunConfig

#: Precisions in which the network itself is in 16 bits, which is the task's business.
_CAST_BY_THE_TASK = ("bf16", "fp16")


def plan(
    recipe: Recipe,
    scale: str,
    labels: Iterable[str] | None = None,
    seeds: int | Sequence[int] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> list[RunConfig]:
    """Return all runs of a recipe at a scale, each with complete options and hyperparameters.

    Later values override earlier ones: defaults, the entry's values, the scale's (for options: the scale's,
    the entry's), ``overrides``. The task and the method of a network in 16 bits must agree on it, so a task's option
    ``precision`` is the method's as well.

    Args:
        recipe: The recipe.
        scale: ``"smoke"``, ``"cpu"`` or ``"paper"``.
        labels: Labels of the entries to run, in any case, or patterns such as ``SGDm-cosine-*``; all by default.
        seeds: How many seeds, or which; the scale's number by default.
        overrides: An option of the task, a hyperparameter (of those entries whose method has it) or ``epochs``; values
            may be strings from the command line.

    Returns:
        The runs, entry by entry.
    """
    if scale not in recipe.scales:
        raise UserError(f"{recipe.name} has no scale {scale!r}: choose one of {', '.join(recipe.scales)}.")
    size, entries, changes = recipe.scales[scale], recipe.chosen(labels), dict(overrides or {})
    _check(recipe, entries, changes)
    epochs = _epochs(changes.pop("epochs", size.epochs))
    numbers = range(size.seeds if seeds is None else seeds) if seeds is None or isinstance(seeds, int) else seeds
    runs = []
    for entry in entries:
        # Options are read from strings like hyperparameters: by the type of their defaults.
        own_options, own_hyper = {**size.options, **entry.options}, {**entry.hyper, **size.hyper.get(entry.label, {})}
        defaults = _defaults(recipe, entry)
        unknown = [*(own_options.keys() - recipe.defaults.keys()), *(own_hyper.keys() - defaults.keys())]
        if unknown:  # a slip in the recipe itself; changes may be meant for other entries
            raise UserError(f"{recipe.name} sets {unknown[0]!r} for {entry.label}, which knows no such setting.")
        options = filled(recipe.defaults, own_options | changes)
        hyper = filled(defaults, own_hyper | changes)
        if "precision" in options and "precision" in hyper:
            hyper["precision"] = options["precision"]
        elif hyper.get("precision") in _CAST_BY_THE_TASK:
            raise UserError(
                f"{recipe.name} cannot cast its network to {hyper['precision']}: leave precision at float32 or take "
                "bf16-autocast."
            )
        for seed in numbers:
            runs.append(RunConfig(recipe.name, entry.label, entry.method, scale, seed, epochs, hyper, options))
    return runs


def _defaults(recipe: Recipe, entry: Entry) -> Mapping[str, Any]:
    """Return the hyperparameters of an entry; where nothing is trained, they are those that the recipe names."""
    return entry.hyper if recipe.compute is not None else METHODS[entry.method].defaults


def _check(recipe: Recipe, entries: Sequence[Entry], changes: Mapping[str, Any]) -> None:
    """Raise an error for a key that neither the task nor any of the methods has, and for infinity and NaN.

    No setting accepts these two, and few check.
    """
    known = {"epochs", *recipe.defaults, *(key for entry in entries for key in _defaults(recipe, entry))}
    for key, value in changes.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"{recipe.name} has no setting {key!r}: {hint}It has {', '.join(sorted(known))}.")
        for part in value.split(",") if isinstance(value, str) else [value]:
            with suppress(TypeError, ValueError):  # no number
                if not math.isfinite(float(part)):
                    raise UserError(f"{key} was {value!r}: numbers must be finite.")


def _epochs(value: Any) -> int:
    try:
        epochs = int(value)
    except (TypeError, ValueError):
        epochs = 0
    if epochs < 1 or str(value).strip() != str(epochs):
        raise UserError(f"epochs was {value!r}: it must be a whole number of at least 1.")
    return epochs
