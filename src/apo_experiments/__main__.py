"""``python -m apo_experiments`` is the command ``apo``, also where the package is not installed."""

from __future__ import annotations

import sys

from apo_experiments.errors import needs_extra

__all__ = ["main"]


def main() -> int:
    """Run the command, also where only torch is installed: what it imports belongs to an extra.

    Returns:
        The exit code.
    """
    try:
        from apo_experiments.cli import main as command
    except ModuleNotFoundError as error:
        print(f"apo: {needs_extra(error)}", file=sys.stderr)
        return 2
    return command()


if __name__ == "__main__":
    sys.exit(main())
