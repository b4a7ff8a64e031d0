"""Sweeps: the paper's grids, tried by any number of workers on any number of machines."""

from apo_experiments.sweep.database import address
from apo_experiments.sweep.grid import Order
from apo_experiments.sweep.ledger import tried
from apo_experiments.sweep.worker import run

__all__ = ["Order", "address", "run", "tried"]
