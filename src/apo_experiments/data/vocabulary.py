"""A subword vocabulary: byte-pair encoding by sentencepiece, one for both languages."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any, final

from apo_experiments.data.text import Pair
from apo_experiments.errors import UserError


@final
class Vocabulary:
    """Text to numbers and back.

    Attributes:
        pad: Fills short sentences.
        bos: Begins a sentence.
        eos: Ends a sentence.
        unk: Replaces what the training text did not contain.
    """

    pad, bos, eos, unk = 0, 1, 2, 3

    def __init__(self, model: bytes) -> None:
        self._processor: Any = _sentencepiece().SentencePieceProcessor(model_proto=model)

    @property
    def size(self) -> int:
        """The number of pieces, including the four special ones."""
        return int(self._processor.get_piece_size())

    def encode(self, text: str) -> list[int]:
        """Return the pieces of a sentence, without beginning and end."""
        return list(self._processor.encode(text))

    def decode(self, pieces: Sequence[int]) -> str:
        """Return the sentence up to the first :attr:`eos`, without special pieces."""
        kept = []
        for piece in pieces:
            if piece == self.eos:
                break
            if piece not in (self.pad, self.bos):
                kept.append(int(piece))
        return str(self._processor.decode(kept))

    def encode_pairs(self, pairs: Iterable[Pair]) -> list[tuple[list[int], list[int]]]:
        """Return both sides of each pair as pieces."""
        return [(self.encode(source), self.encode(target)) for source, target in pairs]


def build(pairs: Sequence[Pair], size: int) -> Vocabulary:
    """Train a joint vocabulary on both sides of the training text."""
    if not pairs:
        raise ValueError("pairs must hold the training text, got none")
    return Vocabulary(_train([side for pair in pairs for side in pair], size))


def _train(lines: Sequence[str], size: int) -> bytes:
    model = io.BytesIO()
    try:
        _sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            hard_vocab_limit=False,  # a tiny text has fewer pieces
            character_coverage=1.0,
            pad_id=Vocabulary.pad,
            bos_id=Vocabulary.bos,
            eos_id=Vocabulary.eos,
            unk_id=Vocabulary.unk,
            num_threads=1,  # the same text gives the same pieces everywhere
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(
            f"No vocabulary of {size} pieces could be built from this text (it has {len(set().union(*lines))} "
            "characters and needs a few pieces more): choose a larger vocabulary."
        ) from error
    return model.getvalue()


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise UserError(
            "Translation needs the package sentencepiece: install it with `pip install 'apo-optim[experiments]'`."
        ) from error
    return sentencepiece
