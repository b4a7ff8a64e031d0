"""``python -m apo_experiments`` is the command ``apo``, also where the package is not installed."""

import sys

from apo_experiments.cli import main

if __name__ == "__main__":
    sys.exit(main())
