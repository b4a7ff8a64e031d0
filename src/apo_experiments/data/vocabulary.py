"""Vocabularies: subwords by sentencepiece, and whole words and characters, which need no package."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, final

import torch
from torch import Tensor

from apo_experiments.data.text import Pair
from apo_experiments.errors import UserError, required

#: Fills short sentences; begins one; ends one; replaces what the training text did not contain, or too rarely.
PAD, BOS, EOS, UNK = 0, 1, 2, 3


@final
class Vocabulary:
    """Subwords: byte-pair encoding by sentencepiece."""

    def __init__(self, model: bytes) -> None:
        self._processor: Any = required("sentencepiece").SentencePieceProcessor(model_proto=model)

    @property
    def size(self) -> int:
        """The number of pieces, including the four special ones."""
        return int(self._processor.get_piece_size())

    def encode(self, text: str) -> list[int]:
        """Return the pieces of a sentence."""
        return list(self._processor.encode(text))

    def decode(self, pieces: Sequence[int]) -> str:
        """Return the sentence up to the first :data:`EOS`, without special pieces."""
        sentence = takewhile(lambda piece: piece != EOS, pieces)
        return str(self._processor.decode([int(piece) for piece in sentence if piece not in (PAD, BOS)]))


def build(pairs: Sequence[Pair], size: int) -> Vocabulary:
    """Train a joint vocabulary on both sides of the training text."""
    if not pairs:
        raise ValueError("pairs must hold the training text, got none")
    lines, model = [side for pair in pairs for side in pair], io.BytesIO()
    try:
        required("sentencepiece").SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            hard_vocab_limit=False,  # a tiny text has fewer pieces
            character_coverage=1.0,
            **dict(zip(("pad_id", "bos_id", "eos_id", "unk_id"), (PAD, BOS, EOS, UNK), strict=True)),
            num_threads=1,  # the same text gives the same pieces everywhere
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(
            f"No vocabulary of {size} pieces could be built from this text (it has {len(set().union(*lines))} "
            "characters and needs a few pieces more): choose a larger vocabulary."
        ) from error
    return Vocabulary(model.getvalue())


@final
class WordVocabulary:
    """Words and punctuation marks, in lower case, to numbers.

    Args:
        pairs: The training text; both languages share the vocabulary.
        size: The number of words, including the four special ones.

    Example:
        >>> vocabulary = WordVocabulary([("Ein Hund.", "A dog."), ("Ein Tag.", "A day.")], size=7)
        >>> vocabulary.encode("A dog."), vocabulary.size
        ([5, 3, 4], 7)
    """

    def __init__(self, pairs: Iterable[Pair], size: int) -> None:
        counts = Counter(word for pair in pairs for side in pair for word in _words(side))
        # By count and then by the alphabet, so that the order of the text does not matter.
        frequent = sorted(counts, key=lambda word: (-counts[word], word))[: size - 4]
        self._places = {word: place for place, word in enumerate(frequent, 4)}
        self.size = 4 + len(frequent)

    def encode(self, text: str) -> list[int]:
        """Return the words of a sentence."""
        return [self._places.get(word, UNK) for word in _words(text)]


def encoded(pairs: Iterable[Pair], vocabulary: Vocabulary | WordVocabulary) -> list[tuple[list[int], list[int]]]:
    """Return both sides of each pair as numbers."""
    return [(vocabulary.encode(source), vocabulary.encode(target)) for source, target in pairs]


def as_numbers(text: str, alphabet: Sequence[str]) -> Tensor:
    """Return the place of each character in an alphabet; what is not in it becomes its first character.

    Example:
        >>> as_numbers("abc?", " abc").tolist()
        [1, 2, 3, 0]
    """
    places = {character: place for place, character in enumerate(alphabet)}
    return torch.tensor([places.get(character, 0) for character in text])


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())
