r"""The deep autoencoder on MNIST (section 5.2.2, appendix B.3; Martens and Grosse, 2015).

The objective is the binary cross-entropy of a picture - summed over its pixels, as in the set-up that the paper
follows, so that it is the likelihood of independent Bernoulli variables - plus :math:`\frac{\lambda}{2}\|\theta\|^2`.
The penalty is part of the loss function, not of the optimizers, so that all of them minimise the same objective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apo.discrepancy import BernoulliKL
from apo_experiments.data import images
from apo_experiments.data.streams import TableBatches
from apo_experiments.errors import UserError
from apo_experiments.models.autoencoder import Autoencoder
from apo_experiments.models.widths import scaled
from apo_experiments.problem import Problem
from apo_experiments.recipe import Setting
from apo_experiments.tasks.evaluation import mean_over

__all__ = ["DEFAULTS", "PenalisedLoss", "autoencoder", "pictures_of", "pixels"]

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
    train, test = (pixels(part, setting.device) for part in pictures_of(options, setting))
    sizes = [train.shape[1], *scaled([1000, 500, 250, 30], options["width"])]
    model = Autoencoder(sizes, initialisation=options["initialisation"]).to(setting.device)
    loss = PenalisedLoss(model, options["l2"])
    stream = TableBatches(train, train, options["batch_size"], setting.seed, setting.device)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {
            "objective": mean_over(model, lambda output, target: loss(output, target).reshape(1), train, train)[0],
            "test_error": mean_over(model, _squared_error, test, test)[0],
        }

    return Problem(model, loss, stream, evaluate, BernoulliKL())


@final
class PenalisedLoss:
    """Cross-entropy of a picture plus the penalty on the network's weights."""

    def __init__(self, model: nn.Module, l2: float) -> None:
        self._parameters, self._l2 = list(model.parameters()), l2

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the objective of a batch."""
        entropy = F.binary_cross_entropy_with_logits(output, target, reduction="sum") / len(output)
        return entropy + 0.5 * self._l2 * sum(parameter.square().sum() for parameter in self._parameters)


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output.sigmoid() - target).square().sum(1).mean().reshape(1)


def pixels(pictures: Tensor, device: torch.device) -> Tensor:
    """Return pictures as rows of numbers from 0 to 1."""
    return pictures.to(device).flatten(1).float() / 255


def pictures_of(options: Mapping[str, Any], setting: Setting) -> tuple[Tensor, Tensor]:
    """Return the training and the test pictures that the options ask for."""
    if options["data"] == "official":
        pictures = images.load("mnist", setting.data_dir)
    elif options["data"] == "generated":
        pictures = images.generated((1, 12, 12), train=options["train_images"] or 512, test=64)
    else:
        raise UserError(f"data was {options['data']!r}: it must be official or generated.")
    return pictures.train_images[: options["train_images"]], pictures.test_images
