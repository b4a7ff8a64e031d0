"""A view moves numbers without changing or losing one."""

from __future__ import annotations

import pytest
import torch
from tests.preconditioners.zoo import ZOO, build
from torch import nn

from apo.preconditioners import (
    ChannelsLastView,
    ConcatenatedView,
    MatrixView,
    ReshapeView,
    TransposedConvView,
    View,
    plan_layers,
)

VIEWS: dict[str, View] = {
    "reshape": ReshapeView((2, 3, 4), (2, 12)),
    "scalar": ReshapeView(()),
    "matrix": MatrixView((3, 2, 2)),
    "matrix with bias": MatrixView((3, 4), bias=True),
    "stack": MatrixView((6, 4), stack=3),
    "stack with bias": MatrixView((6, 4), bias=True, stack=3),
    "transposed": TransposedConvView((4, 3, 2, 2), 1, MatrixView((3, 4, 2, 2), bias=True)),
    "transposed groups": TransposedConvView((4, 3, 2, 2), 2, MatrixView((6, 2, 2, 2), bias=True)),
    "transposed factored": TransposedConvView((4, 3, 2, 2), 2, ChannelsLastView((6, 2, 2, 2))),
    "channels last": ChannelsLastView((3, 2, 2, 3)),
    "concatenated": ConcatenatedView([(2, 3), (), (4,)]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_scatter_and_gather_are_inverses(name):
    view = VIEWS[name]
    parts = [torch.randn(part) for part in view.parts]
    gathered = view.gather(parts)
    assert tuple(gathered.shape) == view.shape
    assert all(torch.equal(a, b) for a, b in zip(view.scatter(gathered), parts, strict=True))
    other = torch.randn(view.shape)
    assert torch.equal(view.gather(view.scatter(other)), other)


@pytest.mark.parametrize("name", VIEWS)
def test_many_layers_are_gathered_and_scattered_as_one_by_one(name):
    view = VIEWS[name]
    parts = [torch.randn(4, *part) for part in view.parts]
    gathered = view.gather(parts)
    assert torch.equal(gathered, torch.stack([view.gather([part[i] for part in parts]) for i in range(4)]))
    assert all(torch.equal(a, b) for a, b in zip(view.scatter(gathered), parts, strict=True))


def test_a_weight_in_channels_last_is_gathered_without_a_copy():
    weight = torch.randn(3, 4, 2, 2).contiguous(memory_format=torch.channels_last)
    gathered = ChannelsLastView(weight.shape).gather([weight])
    assert gathered.data_ptr() == weight.data_ptr() and gathered.is_contiguous()


@pytest.mark.parametrize("conv", ["matrix", "factored"])
@pytest.mark.parametrize("name", ZOO)
def test_views_of_a_plan_are_inverses_on_real_parameters(name, conv):
    for layer in plan_layers(build(name)[0], conv=conv):
        back = layer.view.scatter(layer.view.gather(layer.params))
        assert layer.view.shape == layer.block.shape
        assert all(torch.equal(a, b) for a, b in zip(back, layer.params, strict=True))


def test_missing_tensors_count_as_zeros():
    view = MatrixView((2, 3), bias=True)
    assert torch.equal(view.gather([torch.ones(2, 3), None])[:, 3], torch.zeros(2))
    assert torch.equal(view.gather([None, torch.ones(2)])[:, :3], torch.zeros(2, 3))
    with pytest.raises(ValueError, match="got only None"):
        view.gather([None, None])


def test_stack_must_divide_the_rows():
    with pytest.raises(ValueError, match=r"stack must divide the .* rows, got 4"):
        MatrixView((6, 4), stack=4)


def test_attention_is_split_into_query_key_and_value():
    attention = nn.MultiheadAttention(4, 2)
    layer = plan_layers(attention)[0]
    gathered = layer.view.gather(layer.params)
    for index, weight in enumerate(attention.in_proj_weight.chunk(3)):
        assert torch.equal(gathered[index, :, :4], weight)
    assert torch.equal(gathered[1, :, 4], attention.in_proj_bias[4:8])


@pytest.mark.parametrize("groups", [1, 2])
def test_rows_of_a_transposed_convolution_are_its_output_channels(groups):
    """Doubling one row of the gathered weight doubles exactly that output channel."""
    layer = nn.ConvTranspose2d(4, 6, 3, groups=groups)
    (planned,) = plan_layers(layer)
    x = torch.randn(2, 4, 5, 5)
    before = layer(x)
    gathered = planned.view.gather(planned.params).detach().clone()
    gathered[3] *= 2
    with torch.no_grad():
        for p, part in zip(planned.params, planned.view.scatter(gathered), strict=True):
            p.copy_(part)
    expected = before.clone()
    expected[:, 3] *= 2
    torch.testing.assert_close(layer(x), expected)
