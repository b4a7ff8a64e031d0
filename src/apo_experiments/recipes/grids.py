"""The paper's grids (appendix B), for ``apo sweep``."""

from __future__ import annotations

from collections.abc import Sequence

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
