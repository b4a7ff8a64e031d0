"""The benchmark without tuning: from the records of :mod:`apo_experiments.recipes.no_tuning` to its page.

- :mod:`~apo_experiments.no_tuning.archive` keeps the records of a task in one small file;
- :mod:`~apo_experiments.no_tuning.scores` finds the tuned rates, and scores a method on a task and over all tasks;
- :mod:`~apo_experiments.no_tuning.page` writes ``docs/no-tuning.md`` and draws its figures.
"""

from apo_experiments.no_tuning.archive import archive
from apo_experiments.no_tuning.page import publish

__all__ = ["archive", "publish"]
