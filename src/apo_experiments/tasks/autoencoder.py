r"""The deep autoencoder on MNIST (section 5.2.2, appendix B.3; Martens and Grosse, 2015).

The objective is the binary cross-entropy of a picture - summed over its pixels, as in the set-up that the paper
follows, so that it is the likelihood of independent Bernoulli variables - plus :math:`\frac{\lambda}{2}\|\theta\|^2`.
The penalty is part of the loss function, not of the optimizers, so that all of them minimise the same objective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from apo.discrepancy import BernoulliKL
from apo_experiments.data import images
from apo_experiments.data.streams import TableBatches
from apo_experiments.errors import choose
from apo_experiments.models.mlp import Autoencoder
from apo_experiments.models.parts import scaled
from apo_experiments.problem import Problem
from apo_experiments.recipe import Setting
from apo_experiments.tasks.evaluation import judged

#: Options: ``width`` multiplies the hidden sizes 1000-500-250-30, ``l2`` is the coefficient of the penalty,
#: ``train_images`` takes the first so many.
DEFAULTS: dict[str, Any] = {
    "data": "official",
    "train_images": None,
    "width": 1.0,
    "initialisation": "sparse",
    "l2": 1e-5,
    "batch_size": 512,
}


def autoencoder(options: Mapping[str, Any], setting: Setting) -> Problem:
    """Build the problem.

    Metrics: ``objective`` (over all training images, penalty included), ``test_error`` (squared error of a test
    image, summed over its pixels).

    Args:
        options: See :data:`DEFAULTS`.
        setting: The seed decides the initial weights and the order of the images.
    """
    train, test = pictures_of(options, setting)
    problem = built(train, options, setting)
    objective = judged({"": (train, train)}, {"objective": problem.loss})
    squared = {"error": lambda output, target: (output.sigmoid() - target).square().sum(1).mean()}
    error = judged({"test": (test, test)}, squared)
    return replace(problem, evaluate=lambda model: {**objective(model), **error(model)})


def built(train: Tensor, options: Mapping[str, Any], setting: Setting) -> Problem:
    """Return the network, its loss and the stream of training pictures, without an evaluation."""
    sizes = [train.shape[1], *scaled([1000, 500, 250, 30], options["width"])]
    model = Autoencoder(sizes, initialisation=options["initialisation"]).to(setting.device)
    stream = TableBatches(train, train, options["batch_size"], setting.seed, setting.device)
    weights = list(model.parameters())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return entropy(output, target) + 0.5 * options["l2"] * sum(p.square().sum() for p in weights)

    return Problem(model, loss, stream, lambda model: {}, BernoulliKL())


def entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of a picture."""
    return F.binary_cross_entropy_with_logits(output, target, reduction="sum") / len(output)


def pictures_of(options: Mapping[str, Any], setting: Setting) -> tuple[Tensor, Tensor]:
    """Return the training and the test pictures that the options ask for, as rows of numbers from 0 to 1."""
    if choose("data", options["data"], ("official", "generated")) == "official":
        pictures = images.load("mnist", setting.data_dir)
    else:
        pictures = images.generated((1, 12, 12), train=options["train_images"] or 512, test=64)
    train, test = pictures.train_images[: options["train_images"]], pictures.test_images
    return tuple(part.to(setting.device).flatten(1).float() / 255 for part in (train, test))  # type: ignore[return-value]
