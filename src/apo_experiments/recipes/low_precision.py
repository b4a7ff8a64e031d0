"""Training in 16 bits (Table 3): parameters, activations and gradients are float16, or bfloat16 on CPUs.

The paper's claim: KFAC's inverses suffer from 16-bit numbers and need much damping, which costs about two points;
APO-Precond needs no inverses and stays as good as in 32 bits, with the same weights of FSD and WSD. Everything else is
as in Table 2. The paper does not say which 16-bit format. In float16, without scaling the loss, all methods are about
as good as in 32 bits; in bfloat16 (``--set precision=bf16``) LeNet loses two points with every method, as the paper's
SGDm does not. So float16 is the format of the scale ``paper``. Our KFAC keeps its factors and inverts them in float32:
it meets 16 bits in activations and gradients alone and may lose less than the paper's.

Scales: as for Table 2; smoke and cpu are in bfloat16, in which CPUs convolve faster.
"""

from __future__ import annotations

from dataclasses import replace

from apo_experiments.recipe import Recipe, Scale, by_name
from apo_experiments.recipes import classification
from apo_experiments.recipes.classification import TITLES

#: Table 3: SGDm, KFAC, APO-Precond.
_PAPER = {
    ("cifar10", "lenet"): {"SGDm": 75.65, "KFAC": 74.95, "APO-Precond": 77.25},
    ("cifar10", "resnet18"): {"SGDm": 94.15, "KFAC": 92.72, "APO-Precond": 94.79},
    ("cifar100", "resnet18"): {"SGDm": 73.53, "KFAC": 73.12, "APO-Precond": 75.47},
}


def _recipe(dataset: str, model: str) -> Recipe:
    paper, whole = _PAPER[dataset, model], classification.RECIPES[f"{dataset}-{model}"]
    labels = {*paper, "APO-Eigen"}
    entries = [replace(entry, paper=paper.get(entry.label)) for entry in whole.entries if entry.label in labels]
    cpu, minutes = whole.scales["cpu"], 60 if model == "lenet" else 600
    return classification.image_recipe(
        {"dataset": dataset, "model": model, "precision": "bf16"},
        tuple(entries),
        replace(cpu, minutes=2 * cpu.minutes),
        Scale(200, 3, minutes, {"precision": "fp16"}),
        name=f"low-precision-{model}" if dataset == "cifar10" else f"low-precision-{dataset}-{model}",
        title=f"{TITLES[model]} on {TITLES[dataset]} in 16 bits",
        paper="Table 3",
        notes="APO-Precond keeps its accuracy in 16 bits, KFAC loses about two points.",
    )


RECIPES = by_name(*(_recipe(dataset, model) for dataset, model in _PAPER))
