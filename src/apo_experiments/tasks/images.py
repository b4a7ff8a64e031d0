"""Classification of images: any of the data sets with any of the networks (sections 5.2.3, 5.2.5 and 5.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apo_experiments import models
from apo_experiments.backends import BACKENDS
from apo_experiments.data import images as data
from apo_experiments.data.augment import Normalization
from apo_experiments.data.streams import ImageBatches
from apo_experiments.errors import UserError
from apo_experiments.models.widths import scaled
from apo_experiments.problem import Problem
from apo_experiments.recipe import Setting
from apo_experiments.tasks.evaluation import mean_over
from apo_experiments.tasks.precision import in_precision, number_type

#: Options: the data set and the network; ``width`` multiplies the network's hidden widths; ``augment`` crops and flips
#: at random; ``validation`` holds out 5,000 training images for choosing hyperparameters (a tenth of a small set);
#: ``train_images`` and ``test_images`` take the first so many; ``channels_last`` lays images and kernels out as a GPU's
#: 16-bit units want them (None: there, and nowhere else); the others are described with :data:`BACKENDS`.
DEFAULTS: dict[str, Any] = {
    "dataset": "cifar10",
    "model": "resnet18",
    "data": "official",
    "train_images": None,
    "test_images": None,
    "validation": False,
    "width": 1.0,
    "batch_size": 128,
    "augment": True,
    "precision": "float32",
    "channels_last": None,
    **BACKENDS,
}

#: Networks by name, each from the number of classes, channels and pixels a side, and the multiplier of its widths.
MODELS: dict[str, Callable[[int, int, int, float], nn.Module]] = {
    "mlp": lambda classes, channels, size, width: models.MLP(
        [channels * size * size, *scaled([1000, 1000], width), classes]
    ),
    "lenet": lambda classes, channels, size, width: models.LeNet(classes, channels, width, size),
    "alexnet": lambda classes, channels, size, width: models.AlexNet(classes, channels, width),
    "vgg16": lambda classes, channels, size, width: models.VGG(classes, channels, width),
    "resnet18": lambda classes, channels, size, width: models.resnet18(classes, channels, width),
    "resnet32": lambda classes, channels, size, width: models.resnet32(classes, channels, width),
    "resnet34": lambda classes, channels, size, width: models.resnet34(classes, channels, width),
    "wrn-28-10": lambda classes, channels, size, width: models.WideResNet(28, 10, classes, channels, width=width),
    "wrn-16-4": lambda classes, channels, size, width: models.WideResNet(16, 4, classes, channels, width=width),
    "wrn-16-8": lambda classes, channels, size, width: models.WideResNet(16, 8, classes, channels, width=width),
}

#: Channels, pixels a side and classes of the generated stand-ins.
_SHAPES = {
    "mnist": (1, 28, 10),
    "fashion-mnist": (1, 28, 10),
    "cifar10": (3, 32, 10),
    "cifar100": (3, 32, 100),
    "svhn": (3, 32, 10),
}


def images(options: Mapping[str, Any], setting: Setting) -> Problem:
    """Build the problem.

    Metrics: ``test_accuracy`` (percent) and ``test_loss``, with ``validation`` also ``valid_accuracy`` and
    ``valid_loss`` on the images held out.

    Args:
        options: See :data:`DEFAULTS`.
        setting: The seed decides the initial weights, the order of the images, crops and flips, but not which images
            are held out.
    """
    pictures = data.subset(_load(options, setting), options["train_images"], options["test_images"])
    judged = {"test": (pictures.test_images, pictures.test_labels)}
    if options["validation"]:
        pictures = data.split(pictures, min(5000, len(pictures.train_labels) // 10))
        judged["valid"] = (pictures.test_images, pictures.test_labels)
    model = in_precision(_model(options, pictures), options["precision"]).to(setting.device)
    if _channels_last(options, setting.device):
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    dtype = number_type(options["precision"])
    stream = ImageBatches(
        pictures.train_images,
        pictures.train_labels,
        options["batch_size"],
        setting.seed,
        setting.device,
        pictures.mean,
        pictures.std,
        options["augment"],
        dtype,
    )
    normalize = Normalization(pictures.mean, pictures.std, dtype, setting.device)
    return Problem(model, F.cross_entropy, stream, _Judge(judged, normalize, setting.device, options["precision"]))


class _Judge:
    """Measures accuracy and loss on images on the device."""

    def __init__(
        self,
        judged: Mapping[str, tuple[Tensor, Tensor]],
        normalize: Normalization,
        device: torch.device,
        precision: str,
    ) -> None:
        self._judged = {part: (pictures.to(device), labels.to(device)) for part, (pictures, labels) in judged.items()}
        self._normalize, self._device, self._precision = normalize, device, precision
        self._chunk = 5000 if device.type == "cuda" else 1000  # a CPU's caches are small

    def __call__(self, model: nn.Module) -> dict[str, float]:
        found = {}
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16-autocast"):
            for part, (pictures, labels) in self._judged.items():
                accuracy, loss = mean_over(model, _accuracy_and_loss, pictures, labels, self._normalize, self._chunk)
                found |= {f"{part}_accuracy": accuracy, f"{part}_loss": loss}
        return found


def _accuracy_and_loss(logits: Tensor, labels: Tensor) -> Tensor:
    correct = (logits.argmax(1) == labels).float().mean()
    return torch.stack([100 * correct, F.cross_entropy(logits.float(), labels)])


def _channels_last(options: Mapping[str, Any], device: torch.device) -> bool:
    if options["channels_last"] is None:
        return device.type == "cuda" and options["precision"] != "float32"
    return bool(options["channels_last"])


def _model(options: Mapping[str, Any], pictures: data.ImageSet) -> nn.Module:
    name = options["model"]
    if name not in MODELS:
        raise UserError(f"model was {name!r}: it must be one of {', '.join(MODELS)}.")
    channels, size = pictures.train_images.shape[1:3]
    return MODELS[name](pictures.classes, channels, size, float(options["width"]))


def _load(options: Mapping[str, Any], setting: Setting) -> data.ImageSet:
    name = options["dataset"]
    if options["data"] == "official":
        return data.load(name, setting.data_dir)
    if options["data"] != "generated":
        raise UserError(f"data was {options['data']!r}: it must be official or generated.")
    if name not in _SHAPES:
        raise UserError(f"dataset was {name!r}: it must be one of {', '.join(_SHAPES)}.")
    channels, size, classes = _SHAPES[name]
    train, test = options["train_images"] or 512, options["test_images"] or 256
    return data.generated((channels, size, size), classes, train, test)
