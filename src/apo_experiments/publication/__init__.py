"""From the runs of a machine to what is committed: compact records under ``results/``, and a page made of them alone.

- :mod:`~apo_experiments.publication.compact` writes and reads the records;
- :mod:`~apo_experiments.publication.tuning_log` keeps what was tried on the way;
- :mod:`~apo_experiments.publication.rows` makes rows of a table out of them;
- :mod:`~apo_experiments.publication.page` makes the page.
"""

from apo_experiments.publication.compact import find, read, write
from apo_experiments.publication.page import publish_page
from apo_experiments.publication.rows import rows
from apo_experiments.publication.tuning_log import log_tuning

__all__ = ["find", "log_tuning", "publish_page", "read", "rows", "write"]
