from __future__ import annotations

import sys

import pytest

from apo_experiments.data import text, vocabulary
from apo_experiments.errors import UserError

PAIRS = text.generated(train=60, valid=5, test=5).train


@pytest.mark.parametrize("size", [40, 200, 8000])
def test_text_survives_encoding_and_decoding(size: int) -> None:
    pytest.importorskip("sentencepiece")
    made = vocabulary.build(PAIRS, size)
    assert made.size <= size
    for pair, (source, target) in zip(PAIRS, vocabulary.encoded(PAIRS, made), strict=True):
        assert (made.decode(source), made.decode(target)) == pair
        assert min(source + target) >= 0 and max(source + target) < made.size
        assert not {vocabulary.PAD, vocabulary.BOS, vocabulary.EOS, vocabulary.UNK} & {*source, *target}


def test_decoding_stops_at_the_end_and_skips_padding() -> None:
    pytest.importorskip("sentencepiece")
    made = vocabulary.build(PAIRS, 64)
    pieces = made.encode("bada")
    assert made.decode([vocabulary.BOS, *pieces, vocabulary.PAD, vocabulary.EOS, *pieces]) == "bada"


def test_unknown_characters_become_unk() -> None:
    pytest.importorskip("sentencepiece")
    made = vocabulary.build(PAIRS, 64)
    assert vocabulary.UNK in made.encode("ß")


def test_a_vocabulary_smaller_than_the_alphabet_is_refused() -> None:
    pytest.importorskip("sentencepiece")
    with pytest.raises(UserError, match="No vocabulary of 10 pieces"):
        vocabulary.build(PAIRS, 10)
    with pytest.raises(ValueError, match="pairs must hold the training text"):
        vocabulary.build([], 10)


def test_a_missing_sentencepiece_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"pip install 'apo-optim\[experiments\]'"):
        vocabulary.build(PAIRS, 64)
