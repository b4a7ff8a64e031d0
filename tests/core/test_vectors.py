"""Operations on lists of tensors agree with the obvious ones, however the tensors lie in memory."""

from __future__ import annotations

import pytest
import torch

from apo.vectors import advance_, copies, dot, norm, scaled

LAYOUTS = {
    "contiguous": (torch.contiguous_format, torch.contiguous_format),
    "channels-last": (torch.channels_last, torch.channels_last),
    "mixed": (torch.channels_last, torch.contiguous_format),
}

TYPES = [
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float64),
]


def vector(layout, dtype=torch.float64):
    weight = torch.randn(3, 4, 2, 5, dtype=dtype).contiguous(memory_format=layout)
    return [weight, torch.randn(6, dtype=dtype), torch.randn(2, 3, dtype=dtype).T]


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_inner_product_pairs_elements_by_index_and_not_by_place_in_memory(layouts):
    left, right = (vector(layout) for layout in layouts)
    expected = sum((one * other).sum() for one, other in zip(left, right, strict=True))
    torch.testing.assert_close(dot(left, right), expected)


def test_inner_product_of_16_bit_numbers_is_taken_in_32_bit():
    left = vector(torch.contiguous_format, torch.bfloat16)
    value = dot(left, left)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, norm(left) ** 2)


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "types", [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2]
)
def test_numbers_of_16_bit_move_by_steps_of_32_bit_and_are_rounded_once(layouts, types):
    torch.manual_seed(0)
    target, direction = (vector(layout, dtype) for layout, dtype in zip(layouts, types, strict=True))
    expected = [(t.double() - 0.3 * d.double()).to(t.dtype) for t, d in zip(target, direction, strict=True)]
    places = [tensor.data_ptr() for tensor in target]
    advance_(target, direction, -0.3)
    assert [tensor.data_ptr() for tensor in target] == places
    for one, other in zip(target, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=(eps := torch.finfo(one.dtype).eps), atol=eps)


def test_a_vector_of_several_types_moves_as_well():
    target = [torch.ones(2, dtype=torch.bfloat16), torch.ones(2), torch.ones(2, dtype=torch.float16)]
    advance_(target, [torch.ones(2)] * 3, 0.5)
    assert [tensor.tolist() for tensor in target] == [[1.5, 1.5]] * 3
    assert [tensor.dtype for tensor in target] == [torch.bfloat16, torch.float32, torch.float16]


def test_copies_and_multiples_have_memory_of_their_own():
    source = [torch.nn.Parameter(torch.ones(2, 2)), torch.ones(3)]
    copied, doubled, weighted = copies(source), scaled(source, 2.0), scaled(source, [3.0, 4.0])
    with torch.no_grad():
        source[0].zero_()
    assert not copied[0].requires_grad and copied[0].sum() == 4
    assert doubled[0].sum() == 8 and weighted[0].sum() == 12 and weighted[1].sum() == 12


def test_the_empty_vector_has_length_zero():
    assert dot([], []) == 0 and norm([]) == 0 and copies([]) == [] and scaled([], 2.0) == []
