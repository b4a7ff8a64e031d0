"""Batches that are not plain tensors: kept as B' with their types, and saved where a checkpoint may hold them."""

from __future__ import annotations

import warnings
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from tests.lifecycle.harness import CLASSES, FEATURES, Run, assert_same_run, batch, plain_network, saved_and_loaded
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import apo
from apo.passes.recording import tree_map


class Encoding(UserDict):
    """As Hugging Face's ``BatchEncoding``: entries are attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Bunch(dict):
    """A dictionary that is its own ``__dict__``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Attributes(dict):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


Point = namedtuple("Point", ["inputs", "tag"])


class Reader(nn.Module):
    """Takes one argument with the attribute ``inputs``, and perhaps something else."""

    def __init__(self) -> None:
        super().__init__()
        self.body = plain_network()

    def forward(self, given: Any, other: Any = None) -> Tensor:
        return self.body(given if isinstance(given, Tensor) else given.inputs)


def train(run: Run, wrap: Any, steps: int = 7) -> Run:
    for index in range(steps):
        inputs, target = run.batch(index)
        run.optimizer.zero_grad()
        run.criterion(run.model(*wrap(inputs)), target).backward()
        run.optimizer.step()
    return run


@pytest.mark.parametrize("kind", [Encoding, Bunch, Attributes])
def test_mappings_of_ones_own_stay_what_they_are(kind):
    run = train(Run("attached", network=Reader), lambda inputs: (kind({"inputs": inputs}),))
    assert_same_run(run, train(Run("attached", network=Reader), lambda inputs: (inputs,)))


@pytest.mark.parametrize("kind", [Encoding, Bunch, Attributes])
def test_a_mapped_mapping_has_the_new_values_as_attributes_and_the_old_one_its_own(kind):
    one = torch.ones(2)
    given = kind({"inputs": one, "more": [one]})
    mapped = tree_map(torch.neg, given)
    assert type(mapped) is kind
    assert torch.equal(mapped["inputs"], -one) and torch.equal(mapped.inputs, -one)
    assert torch.equal(mapped["more"][0], -one)
    assert given["inputs"] is one and given.inputs is one


def test_a_mapping_that_cannot_be_written_to_becomes_a_plain_one():
    class Frozen(dict):
        def __setitem__(self, key: Any, value: Any) -> None:
            raise TypeError("frozen")

    assert type(tree_map(torch.neg, Frozen(a=torch.ones(2)))) is dict


def test_packed_sequences_are_kept_as_such():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.GRU(FEATURES, 5, batch_first=True), nn.Linear(5, CLASSES)

        def forward(self, packed: PackedSequence) -> Tensor:
            return self.head(self.cells(packed)[1][-1])

    def pack(inputs: Tensor) -> tuple[PackedSequence]:
        lengths = torch.arange(16, 0, -1).clamp(max=3)
        return (pack_padded_sequence(inputs[:, None].expand(-1, 3, -1), lengths, batch_first=True),)

    run = train(Run("attached", network=Recurrent), pack)
    assert len(run.tuner.history) == 3
    assert type(run.tuner.fsd_batches._previous[-1].calls[0].args[0]) is PackedSequence


def test_inputs_that_require_a_gradient_do_so_as_the_other_batch():
    flags = []

    class Sensitive(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            flags.append(input.requires_grad)
            return super().forward(input)

    run = Run("attached", network=lambda: Sensitive(FEATURES, CLASSES))
    train(run, lambda inputs: (inputs.clone().requires_grad_(),))
    assert len(flags) > 7 and all(flags)
    state = saved_and_loaded(run.tuner.state_dict())
    run.tuner.load_state_dict(state)
    assert run.tuner.fsd_batches._previous[-1].calls[0].args[0].requires_grad


ODD = {
    "named tuple": lambda inputs: (Point(inputs, 3),),
    "mapping": lambda inputs: (Encoding(inputs=inputs),),
    "slice": lambda inputs: (inputs, slice(1, 2)),
    "range": lambda inputs: (inputs, range(3)),
    "function": lambda inputs: (inputs, lambda x: x),
    "in a list": lambda inputs: (inputs, [{"a": range(3)}]),
    "structure": lambda inputs: (inputs, torch.max(inputs, 1)),
}


@pytest.mark.parametrize("wrap", ODD.values(), ids=ODD)
def test_a_batch_that_is_not_plain_data_is_left_out_of_the_checkpoint_with_one_warning(wrap):
    run = train(Run("attached", network=Reader), wrap, steps=6)
    with pytest.warns(
        apo.ApoWarning, match="is not plain data, so it is not saved: .* uses its own batch as B'"
    ) as seen:
        saved_and_loaded(run.tuner.state_dict())
        state = saved_and_loaded(run.tuner.state_dict())
    assert len(seen) == 1
    resumed = Run("attached", network=Reader)
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.tuner.load_state_dict(state)
    train(resumed, wrap, steps=1)
    assert len(resumed.tuner.history) == 3


def test_arrays_of_numpy_are_not_plain_data():
    numpy = pytest.importorskip("numpy")
    for other in (numpy.ones(3), numpy.float64(3)):
        run = train(Run("attached", network=Reader), lambda inputs, other=other: (inputs, other), steps=3)
        with pytest.warns(apo.ApoWarning, match="is not plain data"):
            saved_and_loaded(run.tuner.state_dict())


def test_plain_data_of_every_kind_is_saved_without_a_warning():
    other = [
        None,
        True,
        1,
        2.0,
        1j,
        "a",
        b"b",
        (torch.Size((2, 3)), torch.float16, torch.device("cpu")),
        {"c": {1: []}},
    ]
    run = train(Run("attached", network=Reader), lambda inputs: (inputs, other), steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = saved_and_loaded(run.tuner.state_dict())
    run.tuner.load_state_dict(state)
    assert run.tuner.fsd_batches._previous[-1].calls[0].args[1] == other


@pytest.mark.parametrize("saved", ["previous", "same"])
def test_a_checkpoint_with_another_kind_of_fsd_batch_is_refused_in_a_sentence(saved):
    state = Run("attached", fsd_batch=saved).train(range(2)).tuner.state_dict()
    run = Run("attached", fsd_batch=[batch(700)])
    with pytest.raises(
        ValueError, match="no position for this fsd_batch: pass the kind of fsd_batch with which it was"
    ):
        run.tuner.load_state_dict(state)


def test_a_stream_for_a_network_that_takes_a_mapping_yields_it_in_a_tuple():
    inputs, target = batch(700)
    run = Run("attached", network=Reader, fsd_batch=[((Encoding(inputs=inputs),), target)])
    train(run, lambda inputs: (Encoding(inputs=inputs),), steps=1)
    assert len(run.tuner.history) == 1
