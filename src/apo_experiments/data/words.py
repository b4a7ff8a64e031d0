"""A vocabulary of whole words, which needs no package: the most frequent words of a text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import final

from apo_experiments.data.text import Pair

__all__ = ["WordVocabulary"]


@final
class WordVocabulary:
    """Words and punctuation marks, in lower case, to numbers.

    Attributes:
        pad: Fills short sentences.
        bos: Begins a sentence.
        eos: Ends a sentence.
        unk: Replaces words that are too rare.

    Args:
        pairs: The training text; both languages share the vocabulary.
        size: The number of words, including the four special ones.

    Example:
        >>> vocabulary = WordVocabulary([("Ein Hund.", "A dog."), ("Ein Tag.", "A day.")], size=7)
        >>> vocabulary.encode("A dog."), vocabulary.size
        ([5, 3, 4], 7)
    """

    pad, bos, eos, unk = 0, 1, 2, 3

    def __init__(self, pairs: Iterable[Pair], size: int) -> None:
        counts = Counter(word for pair in pairs for side in pair for word in _words(side))
        # By count and then by the alphabet, so that the order of the text does not matter.
        frequent = sorted(counts, key=lambda word: (-counts[word], word))[: size - 4]
        self._places = {word: place for place, word in enumerate(frequent, 4)}
        self.size = 4 + len(frequent)

    def encode(self, text: str) -> list[int]:
        """Return the words of a sentence, without beginning and end."""
        return [self._places.get(word, self.unk) for word in _words(text)]

    def encode_pairs(self, pairs: Iterable[Pair]) -> list[tuple[list[int], list[int]]]:
        """Return both sides of each pair as words."""
        return [(self.encode(source), self.encode(target)) for source, target in pairs]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())
