"""From runs on one machine to committed results: compact records under ``results/``, and a page generated from them.

- :mod:`~apo_experiments.publication.compact` writes and reads the records;
- :mod:`~apo_experiments.publication.tuning_log` logs the runs that were made to choose hyperparameters;
- :mod:`~apo_experiments.publication.rows` turns records into rows of a table, and has the Markdown that tables share;
- :mod:`~apo_experiments.publication.summary` compares APO with the other methods and lists what is missing;
- :mod:`~apo_experiments.publication.page` writes the page.
"""

from apo_experiments.publication.compact import existing, find, read, write
from apo_experiments.publication.page import publish_page
from apo_experiments.publication.rows import rows
from apo_experiments.publication.tuning_log import log_tuning

__all__ = ["existing", "find", "log_tuning", "publish_page", "read", "rows", "write"]
