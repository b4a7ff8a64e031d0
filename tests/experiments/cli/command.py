"""``apo`` on the small recipes in a process of its own, and in those that it starts.

``PAUSE`` in the environment makes every step so many seconds longer. ``VICTIM`` names a file: the first run to delete
it kills its process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

from tests.experiments.cli import registry
from tests.experiments.stand_ins import install

from apo_experiments.cli import main

if __name__ in ("__main__", "__mp_main__"):  # the second in processes that are spawned
    install(registry.RECIPES, registry.METHODS)
    step = registry.Descent.step

    def slow_step(self, inputs, target):
        time.sleep(float(os.environ.get("PAUSE", 0)))
        with suppress(KeyError, FileNotFoundError):
            os.remove(os.environ["VICTIM"])
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, inputs, target)

    registry.Descent.step = slow_step

if __name__ == "__main__":
    sys.exit(main())
