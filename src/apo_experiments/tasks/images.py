"""Classification of images: any of the data sets with any of the networks (sections 5.2.3, 5.2.5 and 5.3)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apo_experiments import models
from apo_experiments.backends import BACKENDS
from apo_experiments.data import images as data
from apo_experiments.data.augment import Normalization
from apo_experiments.data.streams import ImageBatches
from apo_experiments.errors import choose
from apo_experiments.models.parts import scaled
from apo_experiments.problem import Problem
from apo_experiments.recipe import Setting
from apo_experiments.tasks.evaluation import Measures, judged

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

#: Networks by name, each from the number of classes and channels, and the multiplier of its widths.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": lambda classes, channels, width, size: models.MLP(
        [channels * size * size, *scaled([1000, 1000], width), classes]
    ),
    "lenet": models.LeNet,
    "alexnet": models.AlexNet,
    "vgg16": models.VGG,
    "resnet18": models.resnet18,
    "resnet32": models.resnet32,
    "resnet34": models.resnet34,
    **{
        f"wrn-{depth}-{widen}": functools.partial(models.WideResNet, depth, widen)
        for depth, widen in ((28, 10), (16, 4), (16, 8))
    },
}

#: The type of a network's parameters. Automatic mixed precision leaves it alone; the training step applies that.
NUMBER_TYPES = {
    "float32": torch.float32,
    "bf16-autocast": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

#: What is measured on images; the loss in full precision.
MEASURES: Measures = {
    "accuracy": lambda logits, labels: 100 * (logits.argmax(1) == labels).float().mean(),
    "loss": lambda logits, labels: F.cross_entropy(logits.float(), labels),
}

#: Channels, pixels a side and classes of the generated stand-ins.
_SHAPES = {
    **dict.fromkeys(("mnist", "fashion-mnist"), (1, 28, 10)),
    **dict.fromkeys(("cifar10", "svhn"), (3, 32, 10)),
    "cifar100": (3, 32, 100),
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
    device, parts = setting.device, {"test": (pictures.test_images, pictures.test_labels)}
    if options["validation"]:
        pictures = data.split(pictures, min(5000, len(pictures.train_labels) // 10))
        parts["valid"] = (pictures.test_images, pictures.test_labels)
    channels, size = pictures.train_images.shape[1:3]
    sized = {"size": size} if options["model"] in ("mlp", "lenet") else {}  # the others pool whatever is left
    build = MODELS[choose("model", options["model"], MODELS)]
    model = build(pictures.classes, channels, width=float(options["width"]), **sized)
    dtype = NUMBER_TYPES[choose("precision", options["precision"], NUMBER_TYPES)]
    model = (model if dtype == torch.float32 else SixteenBit(model, dtype)).to(device)
    fast = device.type == "cuda" and options["precision"] != "float32"
    if fast if options["channels_last"] is None else options["channels_last"]:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    normalize = Normalization(pictures.mean, pictures.std, dtype, device)
    train = (pictures.train_images, pictures.train_labels)
    stream = ImageBatches(*train, options["batch_size"], setting.seed, device, normalize, options["augment"])
    parts = {part: (shown.to(device), labels.to(device)) for part, (shown, labels) in parts.items()}
    # A CPU's caches are small.
    judge = judged(parts, MEASURES, prepare=normalize, chunk=5000 if device.type == "cuda" else 1000)

    def evaluate(model: nn.Module) -> dict[str, float]:
        with torch.autocast(device.type, torch.bfloat16, enabled=options["precision"] == "bf16-autocast"):
            return judge(model)

    return Problem(model, F.cross_entropy, stream, evaluate)


def _load(options: Mapping[str, Any], setting: Setting) -> data.ImageSet:
    name = options["dataset"]
    if choose("data", options["data"], ("official", "generated")) == "official":
        return data.load(name, setting.data_dir)
    channels, size, classes = _SHAPES[choose("dataset", name, _SHAPES)]
    train, test = options["train_images"] or 512, options["test_images"] or 256
    return data.generated((channels, size, size), classes, train, test)


@final
class SixteenBit(nn.Module):
    """A network in 16 bits that takes inputs of any precision and returns float32, so that a loss is exact."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model.to(dtype)
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Any:
        """Cast, run, cast back."""
        return self.model(inputs.to(self.dtype)).float()
