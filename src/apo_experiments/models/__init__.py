"""The networks of the paper's experiments, each configurable down to a size that trains in seconds.

Those for images are here: they take the number of ``classes``, the ``channels`` of the images, and ``width``, a factor
on every hidden width.
"""

from apo_experiments.models.convolutional import VGG, AlexNet, LeNet
from apo_experiments.models.mlp import MLP
from apo_experiments.models.resnet import ResNet, WideResNet, resnet18, resnet32, resnet34

__all__ = ["MLP", "VGG", "AlexNet", "LeNet", "ResNet", "WideResNet", "resnet18", "resnet32", "resnet34"]
