"""Second-order baselines that no maintained package offers as optimizers: KFAC and EKFAC."""

from apo_experiments.baselines.curvature import CurvatureOptimizer
from apo_experiments.baselines.ekfac import EKFAC
from apo_experiments.baselines.kfac import KFAC

__all__ = ["CurvatureOptimizer", "EKFAC", "KFAC"]
