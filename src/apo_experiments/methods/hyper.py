"""Hyperparameters, and how the command line's strings become values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from apo_experiments.errors import UserError

#: What every method takes.
COMMON: dict[str, Any] = {
    "lr": 0.1,
    "weight_decay": 0.0,
    "clip_grad_norm": None,
    # "fixed"; "step": times `decay` at each of the `milestones` (fractions of the run); "inverse-sqrt"; "cosine".
    "schedule": "fixed",
    "decay": 0.2,
    "milestones": (0.3, 0.6, 0.8),
    # Steps over which the inverse-sqrt and cosine schedules rise linearly.
    "schedule_warmup": 0,
    # "bf16-autocast" runs forward passes in 16 bit; "bf16" and "fp16" say that the task has cast the network itself.
    "precision": "float32",
    # Replay forward and backward passes as one CUDA graph, where there is CUDA and the batches have one shape.
    "cuda_graph": True,
}

_TRUTHS = {word: value for value in (True, False) for word in ("true yes on 1" if value else "false no off 0").split()}
_NONE = ("none", "null", "")


def filled(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults with some of them replaced; other keys are left out.

    Strings are read as the default's type: ``"0.1"``, ``"true"``, ``"none"``, ``"0.9,0.98"``. Where the default is
    None, a string is read as what it looks like.
    """
    found = dict(defaults)
    for name in filter(defaults.__contains__, overrides):
        value, default = overrides[name], defaults[name]
        try:
            found[name] = _convert(_read(value, default) if isinstance(value, str) else value, default)
        except (KeyError, TypeError, ValueError):
            kinds = {bool: "true or false,", int: "a whole number", float: "a number", tuple: "numbers", str: "a word"}
            kind = "a value" if default is None else f"{kinds[type(default)]} such as {default!r}"
            raise UserError(f"{name} was {value!r}: it must be {kind}.") from None
    return found


def _read(text: str, default: Any) -> Any:
    """Read a string as what the default is; where that is None, as what it looks like."""
    word = text.strip()
    if isinstance(default, str):
        return word
    if word.lower() in _NONE:
        return None
    if isinstance(default, bool) or (default is None and word.lower() in ("true", "false")):
        return _TRUTHS[word.lower()]
    if isinstance(default, tuple) or (default is None and "," in word):
        element = None if default is None else 0.0
        return tuple(_convert(_read(part, element), element) for part in word.split(",") if part.strip())
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    if default is None:
        return word
    raise ValueError(word)


def _convert(value: Any, default: Any) -> Any:
    """Convert a value that is not a string to the type of the default."""
    if isinstance(value, list):  # from JSON
        value = tuple(value)
    if default is None or (isinstance(value, type(default)) and isinstance(value, bool) == isinstance(default, bool)):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(default, float):
            return float(value)
        if isinstance(default, tuple):
            return (float(value),)
        if isinstance(default, int) and not isinstance(default, bool) and value == int(value):
            return int(value)
    raise TypeError(value)
