"""The networks of the paper's experiments, each configurable down to a size that trains in seconds.

Networks for images take the number of ``classes``, the ``channels`` of the images, and ``width``, a factor on every
hidden width.
"""

from apo_experiments.models.convolutional import VGG, AlexNet, LeNet
from apo_experiments.models.decoding import beam_search
from apo_experiments.models.mlp import MLP, Autoencoder
from apo_experiments.models.resnet import ResNet, WideResNet, resnet18, resnet32, resnet34
from apo_experiments.models.transformer import Transformer

__all__ = [
    "AlexNet",
    "Autoencoder",
    "LeNet",
    "MLP",
    "ResNet",
    "Transformer",
    "VGG",
    "WideResNet",
    "beam_search",
    "resnet18",
    "resnet32",
    "resnet34",
]
