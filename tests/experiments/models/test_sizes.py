"""The networks are the ones their names promise: number of weights, shapes, and a signal at the start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from apo_experiments.models import (
    MLP,
    VGG,
    AlexNet,
    LeNet,
    WideResNet,
    resnet18,
    resnet32,
    resnet34,
)
from apo_experiments.models.mlp import Autoencoder
from apo_experiments.models.transformer import Transformer
from apo_experiments.tasks.rosenbrock import Rosenbrock


def weights(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def on_meta(build: object, *args: object, **kwargs: object) -> nn.Module:
    with torch.device("meta"):
        return build(*args, **kwargs)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("build", "args", "expected"),
    [
        (LeNet, (), 62_006),
        (resnet18, (), 11_173_962),
        (resnet34, (), 21_282_122),
        (resnet32, (), 464_154),  # shortcuts without weights; with 1 x 1 convolutions it would be 466,906
        (VGG, (), 14_714_688 + 5_130),
        (WideResNet, (28, 10), 36_479_194),
        (WideResNet, (16, 8), 10_961_370),
        (AlexNet, (), 2_472_266),
        (MLP, ([784, 1000, 1000, 10],), 1_796_010),
    ],
)
def test_number_of_weights_is_the_published_one(build, args, expected):
    assert weights(on_meta(build, *args)) == expected


def test_autoencoder_has_the_papers_widths():
    network = on_meta(Autoencoder)
    shapes = [(m.in_features, m.out_features) for m in network.modules() if isinstance(m, nn.Linear)]
    assert shapes == [
        (784, 1000), (1000, 500), (500, 250), (250, 30), (30, 250), (250, 500), (500, 1000), (1000, 784),
    ]  # fmt: skip


def test_resnet32_with_convolutional_shortcuts_has_the_other_published_size():
    from apo_experiments.models import ResNet

    assert weights(on_meta(ResNet, [5, 5, 5], [16, 32, 64], "convolution")) == 466_906


@pytest.mark.parametrize(
    "network",
    [
        LeNet(width=0.5),
        AlexNet(width=1 / 16),
        VGG(width=1 / 16),
        resnet18(width=1 / 16),
        resnet34(width=1 / 16),
        resnet32(width=1 / 4),
        WideResNet(10, 2, width=0.25),
        MLP([3072, 8, 10], nn.Tanh),
    ],
    ids=lambda network: type(network).__name__,
)
def test_small_image_networks_map_images_to_logits_and_every_weight_gets_a_gradient(network):
    images = torch.randn(4, 3, 32, 32)
    logits = network(images)
    assert logits.shape == (4, 10)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_lenet_takes_mnist_images():
    assert LeNet(channels=1, size=28)(torch.randn(2, 1, 28, 28)).shape == (2, 10)


def test_vgg_without_batchnorm_keeps_the_size_of_its_signal_through_all_layers():
    network = VGG(width=0.25)
    spread = network.features(torch.randn(16, 3, 32, 32)).std()
    assert 0.02 < spread < 10  # with the default initialisation it is below 1e-4


def test_padded_shortcut_keeps_every_other_pixel_and_adds_zero_channels():
    from apo_experiments.models.resnet import _PaddedShortcut

    images = torch.randn(2, 4, 6, 6)
    output = _PaddedShortcut(4, 2)(images)
    assert output.shape == (2, 8, 3, 3)
    assert torch.equal(output[:, 2:6], images[:, :, ::2, ::2])
    assert not output[:, :2].any() and not output[:, 6:].any()


def test_sparse_initialisation_gives_fifteen_incoming_weights_to_a_unit():
    network = Autoencoder([100, 40, 5])
    counts = [(m.weight != 0).sum(1).unique().tolist() for m in network.modules() if isinstance(m, nn.Linear)]
    assert counts == [[15], [15], [5], [15]]


def test_autoencoder_code_is_linear():
    assert isinstance(Autoencoder([20, 8, 3]).encoder.layers[-1], nn.Linear)


def test_rosenbrock_residuals_make_the_function():
    function = Rosenbrock(start=(0.3, -0.7), dtype=torch.float64)
    x, y = 0.3, -0.7
    assert function.value().item() == pytest.approx((1 - x) ** 2 + 100 * (y - x**2) ** 2, rel=1e-12)
    assert torch.equal(function(torch.zeros(1)), function())


def test_rosenbrock_starts_where_the_paper_starts():
    assert Rosenbrock().point.tolist() == [1.0, -1.5]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MLP([3]), "sizes"),
        (lambda: Autoencoder(initialisation="zero"), "initialisation"),
        (lambda: LeNet(size=8), "size"),
        (lambda: LeNet(width=0), "width"),
        (lambda: WideResNet(20, 1), "depth"),
        (lambda: Transformer(10, dimension=10, heads=4), "dimension"),
        (lambda: Rosenbrock((1.0,)), "start"),
    ],
)
def test_bad_argument_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
