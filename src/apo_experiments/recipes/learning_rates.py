"""Learned learning rates against the best fixed rate and a step schedule (Table 4, Figures 5 and 6, appendix C).

The paper's claim: for SGD, SGDm, RMSprop and Adam alike, APO beats the best fixed rate and is competitive with a manual
schedule. ResNet-32: 400 epochs, the schedule divides by 10 at 150 and 250; ResNet-34 and WRN-28-10: 200 epochs, by 5 at
60, 120 and 160; SVHN: 160 epochs, by 10 at 80 and 120, without crops and flips; four seeds. MNIST: two layers of 1,000
ReLU units, batches of 100, 100 epochs, judged by the training loss. The paper gives SVHN's accuracy for SGDm alone, and
the appendix repeats ResNet-34's RMSprop with a schedule as 93.97 where Table 4 has 93.87.

APO has two entries for each base optimizer. ``SGDm-APO-paper`` has the paper's settings, with which a rate with
momentum may run away; the paper's values stand beside these. ``SGDm-APO`` has the library's defaults and knows how long
the run is, so that the rate falls towards its end (:mod:`apo.core.objective`); ``--set total_steps=none`` leaves that
out.

Fixed and initial rates and weight decay are starting points from the grids, not yet the best of a sweep.

Scales: smoke runs on generated images with narrow networks, in seconds; cpu takes real images and a small network for a
few epochs, in minutes; paper is the paper's own, hours to days on one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apo_experiments.recipe import Entry, Recipe, Scale, by_name
from apo_experiments.recipes import grids
from apo_experiments.recipes.classification import TITLES, image_recipe

_BASES = {"SGD": "sgd", "SGDm": "sgdm", "RMSprop": "rmsprop", "Adam": "adam"}

#: Fixed rates, and rates that a schedule starts from.
_FIXED = {"SGD": 0.1, "SGDm": 0.01, "RMSprop": 3e-4, "Adam": 3e-4}
_START = {"SGD": 0.3, "SGDm": 0.1, "RMSprop": 1e-3, "Adam": 1e-3}

#: Learned rates: the library's own, told how many steps there are.
_LEARNED = {"fsd_weight": 0.3, "total_steps": "auto"}

#: The paper's learned rates and where they start; their FSD weight is the largest of the paper's grid.
_PAPER_LEARNED = {"fsd_weight": 0.3, "preset": "paper"}
_PAPER_START = {"SGD": 0.1, "SGDm": 0.1, "RMSprop": 3e-4, "Adam": 3e-4}

_NONE = (None, None, None)

#: Table 4, for each base: fixed, step schedule, APO; for SVHN the text of appendix C.2.
_PAPER: dict[str, Sequence[tuple[float | None, ...]]] = {
    "cifar10-resnet32": ((90.07, 93.30, 92.71), (89.40, 93.34, 92.75), (89.84, 91.94, 91.28), (90.45, 92.26, 91.81)),
    "cifar10-resnet34": ((93.00, 93.54, 94.27), (92.99, 95.08, 94.47), (92.87, 93.87, 93.97), (93.23, 94.12, 93.80)),
    "cifar10-wrn": ((93.38, 94.86, 94.85), (93.46, 95.98, 95.50), (92.91, 93.60, 94.22), (92.81, 94.04, 93.83)),
    "cifar100-wrn": ((76.29, 77.92, 76.87), (74.81, 81.01, 79.33), (72.06, 76.06, 74.17), (72.01, 75.53, 76.33)),
    "svhn-wrn": (_NONE, (97.20, 98.17, 97.96), _NONE, _NONE),
}


def _entries(decay: float, schedule: dict[str, Any], key: str, fixed: dict[str, float]) -> tuple[Entry, ...]:
    """Return four entries for each base optimizer."""
    found: list[Entry] = []
    shared, decays = {"weight_decay": decay}, grids.DECAY_RATE if decay else {}
    for (name, base), values in zip(_BASES.items(), _PAPER.get(key, [_NONE] * 4), strict=True):
        rates = (grids.SGD_RATE if name in ("SGD", "SGDm") else grids.ADAM_RATE) | decays
        learned = grids.APO_RATE | decays
        theirs = shared | _PAPER_LEARNED | {"lr": _PAPER_START[name]}
        found += [
            Entry(f"{name}-fixed", base, shared | {"lr": fixed[name]}, rates, paper=values[0]),
            Entry(f"{name}-step", base, shared | schedule | {"lr": _START[name]}, rates, paper=values[1]),
            Entry(f"{name}-APO-paper", f"{base}-apo", theirs, learned, paper=values[2]),
            Entry(f"{name}-APO", f"{base}-apo", shared | _LEARNED, learned),
        ]
    return tuple(found)


def _step(decay: float, *milestones: float) -> dict[str, Any]:
    return {"schedule": "step", "decay": decay, "milestones": milestones}


def _recipe(
    key: str,
    dataset: str,
    model: str,
    epochs: int,
    schedule: dict[str, Any],
    minutes: float,
    width: float,
    **options: Any,
) -> Recipe:
    return image_recipe(
        {"dataset": dataset, "model": model, **options},
        _entries(5e-4, schedule, key, _FIXED),
        Scale(4, 1, 27, {"train_images": 3000, "test_images": 1000, "width": width}),
        Scale(epochs, 4, minutes),
        name=f"{key}-rate",
        title=f"Learned rates: {TITLES[model]} on {TITLES[dataset]}",
        paper="Figure 8 (appendix C.2)" if dataset == "svhn" else "Table 4",
        notes="APO beats the best fixed rate and is competitive with the step schedule, for every base optimizer.",
    )


_EVERY_FIFTH = _step(0.2, 0.3, 0.6, 0.8)

_MNIST = image_recipe(
    {"dataset": "mnist", "model": "mlp", "batch_size": 100, "augment": False},
    _entries(0.0, _EVERY_FIFTH, "mnist-mlp", _FIXED | {"SGD": 0.3, "SGDm": 0.03}),
    Scale(10, 1, 7, {"width": 0.2}),
    Scale(100, 4, 160),
    name="mnist-mlp",
    title="Learned rates: a multi-layer perceptron on MNIST",
    paper="Figure 5",
    notes="APO converges faster than fixed rates, to a lower training loss; the paper shows SGDm and RMSprop.",
    metric="train_loss",
)

RECIPES = by_name(
    _MNIST,
    _recipe("cifar10-resnet32", "cifar10", "resnet32", 400, _step(0.1, 0.375, 0.625), 4000, 0.5),
    _recipe("cifar10-resnet34", "cifar10", "resnet34", 200, _EVERY_FIFTH, 8000, 0.125),
    _recipe("cifar10-wrn", "cifar10", "wrn-28-10", 200, _EVERY_FIFTH, 32000, 0.05),
    _recipe("cifar100-wrn", "cifar100", "wrn-28-10", 200, _EVERY_FIFTH, 32000, 0.05),
    _recipe("svhn-wrn", "svhn", "wrn-16-8", 160, _step(0.1, 0.5, 0.75), 16000, 0.0625, augment=False),
)
