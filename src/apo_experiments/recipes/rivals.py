"""APO-Precond and newer competitors. These recipes are not in the paper.

EKFAC, SOAP, PSGD with Kronecker factors, Muon, Schedule-Free and Prodigy on three of the paper's tasks, with the
paper's length and seeds; their grids are ours: five rates around each package's own default.

Scales: as for the recipes that the tasks are from.
"""

from __future__ import annotations

from dataclasses import replace

from apo_experiments.methods import METHODS
from apo_experiments.recipe import NOT_IN_PAPER, Entry, Recipe, by_name
from apo_experiments.recipes import autoencoder, classification, uci
from apo_experiments.recipes.grids import smoke_hyper

_RIVALS = {
    "EKFAC": "ekfac",
    "SOAP": "soap",
    "PSGD-Kron": "psgd-kron",
    "Muon": "muon",
    "Schedule-Free-SGD": "schedule-free-sgd",
    "Schedule-Free-AdamW": "schedule-free-adamw",
    "Prodigy": "prodigy",
}


def _recipe(name: str, recipe: Recipe, schedule: str = "fixed") -> Recipe:
    """Return a recipe with the rivals, with its weight decay, and with its APO-Precond."""
    ours = next(entry for entry in recipe.entries if entry.label == "APO-Precond")
    decay = {key: value for key, value in ours.hyper.items() if key == "weight_decay"}
    entries: list[Entry] = []
    for label, method in _RIVALS.items():
        lr = METHODS[method].defaults["lr"]
        # Schedule-Free is meant for a fixed rate.
        own = decay | {"lr": lr, "schedule": "fixed" if label.startswith("Schedule-Free") else schedule}
        entries.append(Entry(label, method, own, {"lr": tuple(lr * factor for factor in (10, 3, 1, 0.3, 0.1))}))
    entries.append(replace(ours, paper=None))
    scales = {
        size: replace(
            scale,
            minutes=2 * scale.minutes,
            hyper=smoke_hyper(entries) if size == "smoke" else scale.hyper,
        )
        for size, scale in recipe.scales.items()
    }
    return replace(
        recipe,
        name=f"rivals-{name}",
        title=f"{recipe.title}: today's rivals",
        paper=NOT_IN_PAPER,
        scales=scales,
        entries=tuple(entries),
        notes="Today's rivals on a task of the paper; the paper makes no claim about them.",
    )


RECIPES = by_name(
    _recipe("parkinsons", uci.RECIPES["uci-parkinsons"]),
    _recipe("autoencoder", autoencoder.RECIPES["mnist-autoencoder"]),
    _recipe("lenet", classification.RECIPES["cifar10-lenet"], "step"),
)
