"""Errors that a user of the command line can fix."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(Exception):
    """An error whose message is one sentence for the user: what is wrong and what to do."""
