"""Settings that recipes share: the paper's grids (appendix B) for ``apo sweep``, and what every smoke run needs.

In a smoke run a few steps must be enough to pass through all parts of a method.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from apo_experiments.methods import METHODS
from apo_experiments.recipe import Entry

#: Values to try, by hyperparameter.
Grid = dict[str, Sequence[float | str]]

_DAMPINGS = (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)

# Regression (B.2) and the autoencoder (B.3). The paper lists 3e-4 twice for Adam.
SGDM_UCI: Grid = {"lr": (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)}
ADAM_UCI: Grid = {"lr": (1e-2, 3e-3, 1e-3, 3e-4, 1e-4)}
ADAM_AUTOENCODER: Grid = {"lr": (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)}
SHAMPOO: Grid = {"lr": (10.0, 5.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)}
KFAC_UCI: Grid = {"lr": (0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001), "damping": _DAMPINGS}
KFAC_AUTOENCODER: Grid = {
    "lr": (0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001, 0.00003, 0.00001),
    "damping": (3e-1, 1e-1, *_DAMPINGS),
}
APO_UCI: Grid = {"wsd_weight": (3.0, 1.0, 0.1, 0.01)}
APO_AUTOENCODER: Grid = {"fsd_weight": (0.3, 0.1), "wsd_weight": (3.0, 1.0, 0.3, 0.1)}

# Image classification with a preconditioner (B.4): weights of the discrepancies without and with BatchNorm.
SGDM_CIFAR: Grid = {"lr": (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)}
ADAM_CIFAR: Grid = {"lr": (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)}
KFAC_CIFAR: Grid = {"lr": (0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001, 0.00003, 0.00001), "damping": _DAMPINGS}
APO_PLAIN: Grid = {"fsd_weight": (0.3, 0.1), "wsd_weight": (3.0, 1.0, 0.3, 0.1)}
APO_NORMALISED: Grid = {"fsd_weight": (3.0, 1.0), "wsd_weight": (0.3, 0.1, 0.03, 0.01)}
DECAY_PRECOND: Grid = {"weight_decay": (5e-4, 1e-4, 5e-5)}

# Learning rates (B.4).
SGD_RATE: Grid = {"lr": (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)}
ADAM_RATE: Grid = {"lr": (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001, 0.00003, 0.00001)}
APO_RATE: Grid = {"fsd_weight": (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)}
DECAY_RATE: Grid = {"weight_decay": (0.01, 0.003, 0.001, 0.0003, 0.0001, 0.0)}

# Translation (B.5).
SGDM_TRANSLATION: Grid = {
    "lr": (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001),
    "schedule": ("fixed", "inverse-sqrt"),
}
ADAMW_TRANSLATION: Grid = {"lr": (0.05, 0.001, 0.0005, 0.0001)}

#: Values for a run of a few steps, for those methods that have the hyperparameter.
_SHORT: dict[str, Any] = {
    "interval": 2,
    "warmup_interval": 1,
    "warmup_steps": 2,
    "statistics_interval": 1,
    "inverse_interval": 2,
    "start_step": 2,
    "schedule_warmup": 2,
}

#: Values for one method: PSGD's factors are slow where torch finds no package for the order of tensor products.
_SHORT_OF: dict[str, dict[str, Any]] = {"psgd-kron": {"max_dim": 16}}


def entries(
    rates: tuple[float, float, float],
    kfac: tuple[float, float],
    apo: Mapping[str, Any],
    eigen: Mapping[str, Any],
    grids: tuple[Grid, Grid, Grid] = (ADAM_UCI, KFAC_UCI, APO_UCI),
) -> tuple[Entry, ...]:
    """Return the methods of the regressions and of the autoencoder.

    Args:
        rates: Of SGDm, Adam and Shampoo.
        kfac: Rate and damping of KFAC.
        apo: Hyperparameters of APO-Precond.
        eigen: Hyperparameters of APO-Eigen, which is not in the paper.
        grids: Of Adam, KFAC, and both forms of APO.
    """
    return (
        Entry("SGDm", "sgdm", {"lr": rates[0]}, SGDM_UCI),
        Entry("Adam", "adam", {"lr": rates[1]}, grids[0]),
        Entry("Shampoo", "shampoo", {"lr": rates[2]}, SHAMPOO),
        Entry("KFAC", "kfac", dict(zip(("lr", "damping"), kfac, strict=True)), grids[1]),
        Entry("APO-Precond", "apo-precond", apo, grids[2]),
        Entry("APO-Eigen", "apo-eigen", eigen, grids[2]),
    )


def smoke_hyper(entries: Iterable[Entry], keep: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Return hyperparameters for :attr:`Scale.hyper` that make a few steps enough.

    Args:
        entries: The entries of a recipe.
        keep: Hyperparameters that stay as they are, because the recipe is about them.
    """
    short = {name: value for name, value in _SHORT.items() if name not in set(keep)}
    return {
        entry.label: {name: value for name, value in short.items() if name in METHODS[entry.method].defaults}
        | _SHORT_OF.get(entry.method, {})
        for entry in entries
    }
