"""The deep sigmoid autoencoder on MNIST (Figure 4 right).

The paper's claim: APO-Precond converges faster than first-order methods and close to other second-order ones, although
KFAC stays ahead. Eight layers 784-1000-500-250-30 and back, batches of 512, 1,000 epochs, an L2 penalty of 1e-5 / 2,
three seeds. The initial weights are sparse, as in the set-up of Martens and Grosse (2015) that the paper follows.

The settings are not swept. APO-Precond's start, momentum and scale are the best of six trials at scale cpu (without
momentum, at its old start of 0.03, it was still behind SGDm after ten epochs); SGDm's rate is the better of two; Adam,
Shampoo and KFAC run at their first guess. APO-Eigen, which is not in the paper, has the library's defaults.

Scales: smoke runs on generated pictures in seconds; cpu takes a quarter of the widths, 20,000 digits, batches of 256
and ten epochs; paper is the paper's own.
"""

from __future__ import annotations

from apo_experiments.recipe import Recipe, Scale, by_name
from apo_experiments.recipes import grids
from apo_experiments.tasks.autoencoder import DEFAULTS, autoencoder

_APO = {"lr": 0.1, "scale": 0.2, "momentum": 0.9, "fsd_weight": 0.1, "wsd_weight": 0.1}
_META = {"meta_lr": 1e-3, "warmup_lr": 0.003, "warmup_interval": 1}
_GRIDS = (grids.ADAM_AUTOENCODER, grids.KFAC_AUTOENCODER, grids.APO_AUTOENCODER)
#: The paper's methods, and one of ours.
ENTRIES = grids.entries((0.01, 1e-3, 0.01), (0.01, 3e-1), _APO | _META, {}, _GRIDS)

#: Options of the task for seconds.
SMOKE = {"data": "generated", "width": 0.05, "train_images": 128, "batch_size": 32}

RECIPES = by_name(
    Recipe(
        name="mnist-autoencoder",
        title="A deep sigmoid autoencoder on MNIST",
        paper="Figure 4 right",
        task=autoencoder,
        defaults=DEFAULTS,
        data=("mnist",),
        scales={
            "smoke": Scale(2, 1, 0.1, SMOKE, grids.smoke_hyper(ENTRIES)),
            "cpu": Scale(10, 1, 8, {"width": 0.25, "train_images": 20000, "batch_size": 256}),
            "paper": Scale(1000, 3, 600),
        },
        entries=ENTRIES,
        metric="objective",
        goal="min",
        notes="APO-Precond is faster than first-order methods; the paper's KFAC stays ahead of it.",
    )
)
