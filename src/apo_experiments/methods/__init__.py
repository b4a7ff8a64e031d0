"""Methods: every optimizer of the paper, newer competitors, and APO on each."""

from apo_experiments.method import Method
from apo_experiments.methods.apo_precond import PRECONDITIONED
from apo_experiments.methods.apo_rate import RATE
from apo_experiments.methods.packages import PACKAGES
from apo_experiments.methods.plain import PLAIN
from apo_experiments.methods.second_order import SECOND_ORDER
from apo_experiments.methods.tuners import TUNERS

__all__ = ["METHODS"]

#: All methods, by name.
METHODS: dict[str, Method] = {**PLAIN, **SECOND_ORDER, **PACKAGES, **RATE, **PRECONDITIONED, **TUNERS}
