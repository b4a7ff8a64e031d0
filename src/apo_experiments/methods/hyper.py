"""Hyperparameters, and how the command line's strings become values."""

from __future__ import annotations

from collections.abc import Mapping
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

_TRUE, _FALSE, _NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null", "")


def filled(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults with some of them replaced; other keys are left out.

    Strings are read as the default's type: ``"0.1"``, ``"true"``, ``"none"``, ``"0.9,0.98"``. Where the default is
    None, a string is read as what it looks like.
    """
    own = {name: _coerce(name, value, defaults[name]) for name, value in overrides.items() if name in defaults}
    return {**defaults, **own}


def _coerce(name: str, value: Any, default: Any) -> Any:
    try:
        if isinstance(value, str):
            return _read(value, default)
        if isinstance(value, list):  # from JSON
            value = tuple(value)
        return _convert(value, default)
    except (TypeError, ValueError):
        kinds = {bool: "true or false,", int: "a whole number", float: "a number", tuple: "numbers", str: "a word"}
        kind = "a value" if default is None else f"{kinds[type(default)]} such as {default!r}"
        raise UserError(f"{name} was {value!r}: it must be {kind}.") from None


def _read(text: str, default: Any) -> Any:
    word = text.strip()
    if word.lower() in _NONE and not isinstance(default, str):
        return _convert(None, default)
    if isinstance(default, bool):
        if word.lower() in _TRUE + _FALSE:
            return word.lower() in _TRUE
        raise ValueError(word)
    if isinstance(default, str):
        return word
    if isinstance(default, tuple):
        return tuple(float(part) for part in word.split(",") if part.strip())
    if default is None:
        return _guess(word)
    return _convert(float(word), default)


def _guess(word: str) -> Any:
    if "," in word:
        return tuple(_guess(part.strip()) for part in word.split(",") if part.strip())
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _convert(value: Any, default: Any) -> Any:
    """Convert a value that is not a string to the type of the default."""
    if default is None or (isinstance(value, type(default)) and not isinstance(value, bool)):
        return value
    if isinstance(default, bool) or isinstance(value, bool):
        if isinstance(default, bool) and isinstance(value, bool):
            return value
        raise TypeError(value)
    if isinstance(default, int) and isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(default, float) and isinstance(value, int):
        return float(value)
    if isinstance(default, tuple) and isinstance(value, (int, float)):
        return (float(value),)
    raise TypeError(value)
