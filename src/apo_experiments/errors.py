"""Errors that a user of the command line can fix."""

from __future__ import annotations

__all__ = ["UserError", "needs_extra"]


class UserError(Exception):
    """An error whose message is one sentence for the user: what is wrong and what to do."""


def needs_extra(error: ModuleNotFoundError) -> str:
    """Return the sentence for a package of the extra ``experiments`` that is not installed.

    Example:
        >>> needs_extra(ModuleNotFoundError(name="numpy"))
        "The command apo needs numpy, which is not installed: run pip install 'apo-optim[experiments]'."
    """
    package = (error.name or str(error)).partition(".")[0]
    return f"The command apo needs {package}, which is not installed: run pip install 'apo-optim[experiments]'."
