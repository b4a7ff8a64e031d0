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

from apo_experiments.recipe import Recipe, Scale
from apo_experiments.recipes.classification import CPU, CPU_HYPER, SMOKE, SMOKE_WIDTHS, TITLES, entries
from apo_experiments.recipes.smoke import smoke_hyper
from apo_experiments.tasks.images import DEFAULTS, images

#: Table 3: SGDm, KFAC, APO-Precond.
_PAPER = {
    ("cifar10", "lenet"): {"SGDm": 75.65, "KFAC": 74.95, "APO-Precond": 77.25},
    ("cifar10", "resnet18"): {"SGDm": 94.15, "KFAC": 92.72, "APO-Precond": 94.79},
    ("cifar100", "resnet18"): {"SGDm": 73.53, "KFAC": 73.12, "APO-Precond": 75.47},
}


def _recipe(dataset: str, model: str) -> Recipe:
    paper = _PAPER[dataset, model]
    labels = {*paper, "APO-Eigen"}
    chosen = tuple(replace(entry, paper=paper.get(entry.label)) for entry in entries(model) if entry.label in labels)
    cpu, epochs, minutes = CPU[model]
    name = f"low-precision-{model}" if dataset == "cifar10" else f"low-precision-{dataset}-{model}"
    return Recipe(
        name=name,
        title=f"{TITLES[model]} on {TITLES[dataset]} in 16 bits",
        paper="Table 3",
        task=images,
        defaults=DEFAULTS | {"dataset": dataset, "model": model, "precision": "bf16"},
        data=(dataset,),
        scales={
            "smoke": Scale(2, 1, 0.1, SMOKE | {"width": SMOKE_WIDTHS[model]}, smoke_hyper(chosen)),
            "cpu": Scale(epochs, 1, 2 * minutes, cpu, CPU_HYPER[model]),
            "paper": Scale(200, 3, 60 if model == "lenet" else 600, {"precision": "fp16"}),
        },
        entries=chosen,
        metric="test_accuracy",
        goal="max",
        notes="APO-Precond keeps its accuracy in 16 bits, KFAC loses about two points.",
    )


RECIPES = {recipe.name: recipe for recipe in (_recipe(dataset, model) for dataset, model in _PAPER)}
