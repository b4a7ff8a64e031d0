"""Every parameter that trains has exactly one block, and the block that suits it."""

from __future__ import annotations

import pytest
import torch
from tests.preconditioners.zoo import ZOO, Cnn, LoneParameters, Recurrent, TiedLanguageModel, build
from torch import nn

from apo.preconditioners import Kronecker, plan_layers


def shapes(model, **options) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns for each layer of the plan the kind of its block and its shape."""
    plan = plan_layers(model, **options)
    return {layer.name: (type(layer.block).__name__.removesuffix("Block"), layer.block.shape) for layer in plan}


def dense(model, **options) -> dict[str, list[str]]:
    """Returns for each layer of the plan the names of its dense factors."""
    return {
        layer.name: [key for key in layer.block.factors if key not in ("S", "s")]
        for layer in plan_layers(model, **options)
    }


@pytest.mark.parametrize("conv", ["matrix", "factored", "auto"])
@pytest.mark.parametrize("structure", ["kronecker", "eigenbasis", "diagonal", "full"])
@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_is_covered_exactly_once(name, structure, conv):
    model, _ = build(name)
    plan = plan_layers(model, structure, conv=conv)
    covered = [id(p) for layer in plan for p in layer.params]
    assert len(covered) == len(set(covered))
    assert set(covered) == {id(p) for p in model.parameters()}
    assert len({layer.name for layer in plan}) == len(plan)
    names = dict(model.named_parameters())
    if structure != "full":
        assert all(names[layer.name] is layer.params[0] for layer in plan)


def test_convolutions_as_matrices():
    assert shapes(Cnn()) == {
        "conv.weight": ("Kronecker", (4, 19)),
        "norm.weight": ("Diagonal", (4,)),
        "norm.bias": ("Diagonal", (4,)),
        "grouped.weight": ("Kronecker", (6, 13)),
        "pointwise.weight": ("Kronecker", (4, 7)),
        "up.weight": ("Kronecker", (6, 9)),
        "down.weight": ("Kronecker", (2, 24)),
        "group_norm.weight": ("Diagonal", (2,)),
        "group_norm.bias": ("Diagonal", (2,)),
    }


def test_convolutions_factored():
    found = shapes(Cnn(), conv="factored")
    assert found["conv.weight"] == ("FactoredConv", (4, 9, 2))
    assert found["conv.bias"] == ("Diagonal", (4,))
    assert found["grouped.weight"] == ("FactoredConv", (6, 6, 2))
    assert found["pointwise.weight"] == ("Kronecker", (4, 7))
    assert found["up.weight"] == ("FactoredConv", (6, 4, 2))
    assert found["down.weight"] == ("FactoredConv", (2, 4, 6))


def test_recurrent_layers_have_one_matrix_per_gate():
    found = shapes(Recurrent())
    assert found["lstm.weight_ih_l0"] == ("Kronecker", (4, 4, 4))
    assert found["lstm.weight_hh_l1_reverse"] == ("Kronecker", (4, 4, 3))
    assert found["lstm.weight_hr_l0"] == ("Kronecker", (2, 4))
    assert found["gru.weight_ih_l0"] == ("Kronecker", (3, 3, 5))
    assert found["plain.weight_hh_l0"] == ("Kronecker", (1, 2, 2))
    assert found["cell.weight_ih"] == ("Kronecker", (4, 3, 3))
    assert not any("bias" in name for name in found)


def test_embeddings_have_no_factor_on_the_vocabularys_side_and_a_tied_head_keeps_its_bias():
    assert dense(TiedLanguageModel()) == {"embedding.weight": ["A"], "bag.weight": ["A"], "head.bias": []}


def test_lone_parameters_are_treated_by_their_shape():
    assert shapes(LoneParameters()) == {
        "temperature": ("Diagonal", ()),
        "token": ("Diagonal", (1, 1, 3)),
        "positions": ("Kronecker", (4, 3)),
        "cube": ("Kronecker", (2, 6)),
        "bilinear.weight": ("Kronecker", (2, 10)),
        "heads.0": ("Kronecker", (3, 2)),
        "heads.1": ("Kronecker", (3, 2)),
        "wide_norm.weight": ("Diagonal", (4, 3)),
        "wide_norm.bias": ("Diagonal", (4, 3)),
    }


def test_sides_longer_than_max_dim_lose_their_dense_factor():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3), nn.Conv1d(5, 6, 2), nn.Embedding(3, 6))
    assert dense(model, max_dim=5) == {
        "0.weight": ["A"],
        "1.weight": ["B"],
        "2.weight": [],
        "3.weight": [],
    }
    assert dense(model, max_dim=5, conv="factored")["2.weight"] == ["A_in", "A_kernel"]


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    assert shapes(model) == {
        "1.weight": ("Kronecker", (3, 5)),
        "2.bias": ("Diagonal", (2,)),
    }


def test_a_subset_is_planned_alone_and_strangers_by_their_shape():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    stranger = nn.Parameter(torch.zeros(3, 2))
    assert shapes(model, params=[model[1].weight, stranger]) == {
        "1.weight": ("Kronecker", (3, 5)),
        "parameter.0": ("Kronecker", (3, 2)),
    }


def test_parameters_without_a_module_are_planned():
    assert shapes([nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]) == {
        "parameter.0": ("Kronecker", (2, 3)),
        "parameter.1": ("Diagonal", (4,)),
    }


def test_wrappers_do_not_show_in_names():
    inner = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    expected = [layer.name for layer in plan_layers(inner)]
    assert [layer.name for layer in plan_layers(nn.DataParallel(inner))] == expected
    assert [layer.name for layer in plan_layers(torch.compile(inner))] == expected
    inner[1] = torch.compile(inner[1])
    assert [layer.name for layer in plan_layers(inner)] == expected


def test_a_parametrised_weight_is_planned_where_its_original_is():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    covered = [id(p) for layer in plan_layers(model) for p in layer.params]
    assert sorted(covered) == sorted(id(p) for p in model.parameters())


def test_a_bias_that_is_not_one_number_per_row_has_a_block_of_its_own():
    model = nn.Linear(3, 2)
    model.bias = nn.Parameter(torch.zeros(1))
    assert shapes(model) == {"weight": ("Kronecker", (2, 3)), "bias": ("Diagonal", (1,))}


def test_factors_follow_the_type_of_the_parameters():
    model = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2), nn.Linear(2, 2).double())
    types = [layer.block.factors["S"].dtype for layer in plan_layers(model)]
    assert types == [torch.float32, torch.float32, torch.float64]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"structure": "dense"}, "structure must be .*, got 'dense'"),
        ({"conv": "spatial"}, "conv must be .*, got 'spatial'"),
        ({"max_dim": 0}, "max_dim must be a positive integer, got 0"),
        ({"max_dim": 2.5}, "max_dim must be .*, got 2.5"),
    ],
)
def test_refuses_unknown_choices(options, message):
    with pytest.raises(ValueError, match=message):
        plan_layers(nn.Linear(2, 2), **options)


def test_refuses_what_cannot_be_planned():
    with pytest.raises(ValueError, match=r"max_dim must be at least the number of parameters, 110, .*, got 109"):
        plan_layers(nn.Linear(10, 10), "full", max_dim=109)
    with pytest.raises(ValueError, match="model must have a parameter that requires gradients, got none"):
        plan_layers(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="run one batch"):
        plan_layers(nn.LazyLinear(3))
    with pytest.raises(TypeError, match=r"must be real, got torch\.complex64"):
        plan_layers(nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(TypeError, match=r"model must be a module.*, got a str"):
        Kronecker(["weight"])
