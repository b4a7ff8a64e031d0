"""From runs on one machine to committed results: compact records under ``results/``, and a page generated from them.

- :mod:`~apo_experiments.publication.compact` writes and reads the records, and logs the runs of sweeps;
- :mod:`~apo_experiments.publication.rows` turns records into rows of a table, and has the Markdown that tables share;
- :mod:`~apo_experiments.publication.page` writes the page and its summary.
"""
