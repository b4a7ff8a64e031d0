"""Slow and simple versions of what the library does, for tests, teaching and figures.

Each module implements its part from the definition, shares no code with the fast version, and keeps the precision of
its inputs; the tests compare the two. Everything is dense or unrolled and meant for small problems.

- :mod:`~apo.reference.updates`: one step of each base optimizer.
- :mod:`~apo.reference.unrolled`: the meta-gradient through the unrolled graph.
- :mod:`~apo.reference.curvature`: dense Hessian, generalized Gauss-Newton and Fisher matrices.
- :mod:`~apo.reference.proximal`: the exact proximal point update, and Figure 1.
- :mod:`~apo.reference.methods`: closed-form steps of the classical methods.
- :mod:`~apo.reference.meta_objective`: the approximate meta-objective of Theorem 1.
"""

from . import methods, updates
from .curvature import fisher, flatten, fsd_hessian, ggn, hessian, unflatten
from .meta_objective import approximate_meta_objective, optimal_preconditioner
from .proximal import RegressionCurves, exact_proximal_point, one_dimensional_regression
from .unrolled import ProximalTerms, batch_gradient, parameters_of, proximal_objective, unrolled_meta_gradient

__all__ = [
    # modules
    "methods",
    "updates",
    # meta-gradient
    "proximal_objective",
    "unrolled_meta_gradient",
    "batch_gradient",
    "ProximalTerms",
    # curvature
    "hessian",
    "ggn",
    "fisher",
    "fsd_hessian",
    # proximal point
    "exact_proximal_point",
    "one_dimensional_regression",
    "RegressionCurves",
    # theory
    "approximate_meta_objective",
    "optimal_preconditioner",
    # vectors
    "flatten",
    "unflatten",
    "parameters_of",
]
