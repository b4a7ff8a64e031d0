"""Errors that a user of the command line can fix."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any


class UserError(Exception):
    """An error whose message is one sentence for the user: what is wrong and what to do."""


def choose(name: str, value: Any, choices: Collection[str]) -> Any:
    """Return a value that must be one of several words."""
    if value not in choices:
        words = " or ".join(choices) if len(choices) == 2 else f"one of {', '.join(choices)}"
        raise UserError(f"{name} was {value!r}: it must be {words}.")
    return value


def required(module: str, extra: str = "experiments", package: str | None = None) -> Any:
    """Import a package of an extra, or raise a UserError that says how to install it.

    Args:
        module: What to import.
        extra: The extra of apo-optim that brings it.
        package: Its name for pip, if that is another one.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = package or error.name or module
        raise UserError(
            f"This needs the package {name}, which is not installed: pip install 'apo-optim[{extra}]'."
        ) from error
