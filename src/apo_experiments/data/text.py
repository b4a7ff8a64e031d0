"""Parallel text, German to English: Multi30k, Tatoeba, IWSLT'14, and a generated toy language."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apo_experiments.data.locate import Damaged, opened

#: A sentence and its translation.
Pair = tuple[str, str]


@dataclass(frozen=True)
class ParallelText:
    """Sentences (German) with their translations (English), in three splits."""

    name: str
    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]


_SPLITS = {
    "multi30k": ("train", "val", "test_2016_flickr"),
    "iwslt14": ("train", "valid", "test"),
}


def load(name: str, data_dir: str | Path | None = None, seed: int = 0) -> ParallelText:
    """Load an official parallel corpus.

    Args:
        name: ``"multi30k"`` or ``"iwslt14"``, with their own splits, or ``"tatoeba"``, which has none: one sentence in
            fifty is for validation, one for test, with all its translations, and theirs, in both directions.
        data_dir: Folder of the files; None as in :func:`apo_experiments.data.locate.directory`.
        seed: Decides Tatoeba's split and order.
    """
    with opened(name, "text", data_dir) as root:
        if name == "tatoeba":
            return _load_tatoeba(name, root / "de-en/deu.txt", seed)
        return ParallelText(name, *(_load_pair(root / "de-en" / name, part) for part in _SPLITS[name]))


def generated(train: int = 400, valid: int = 40, test: int = 40, words: int = 24, seed: int = 0) -> ParallelText:
    """Generate translations between two toy languages that can be learned.

    Words are translated one by one, and the last word of the source becomes the second of the target, like a German
    verb in English.
    """
    draw = random.Random(seed)
    german, english = _words("bdgklm", "aou", words), _words("fnprst", "eiy", words)
    translation = dict(zip(german, draw.sample(english, words), strict=True))
    pairs: dict[str, str] = {}
    while len(pairs) < train + valid + test:
        sentence = draw.choices(german, k=draw.randint(4, 8))
        target = [translation[word] for word in (sentence[0], sentence[-1], *sentence[1:-1])]
        pairs[" ".join(sentence)] = " ".join(target)
    drawn = list(pairs.items())
    return ParallelText("generated", drawn[:train], drawn[train : train + valid], drawn[train + valid :])


def _words(consonants: str, vowels: str, count: int) -> list[str]:
    """Return the first words of two syllables over an alphabet."""
    syllables = [c + v for v in vowels for c in consonants]
    if not 2 <= count <= len(syllables) ** 2:
        raise ValueError(f"words must be from 2 to {len(syllables) ** 2}, got {count}")
    # Walk along the diagonals, so that even a small vocabulary uses all syllables.
    size = len(syllables)
    return [syllables[i % size] + syllables[(i + i // size) % size] for i in range(count)]


def _lines(path: Path) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Damaged(path, f"is truncated or corrupted (no UTF-8 at byte {error.start:,})") from error
    if not content.endswith("\n"):
        raise Damaged(path, "is truncated (its last line has no end)")
    # Not splitlines(): it also splits at characters that occur inside of sentences.
    return [line.strip() for line in content[:-1].split("\n")]


def _load_pair(folder: Path, part: str) -> list[Pair]:
    german, english = (_lines(folder / f"{part}.{language}") for language in ("de", "en"))
    if len(german) != len(english):
        reason = f"has {len(english):,} lines for {len(german):,} in {part}.de"
        raise Damaged(folder / f"{part}.en", reason)
    return list(zip(german, english, strict=True))


def _load_tatoeba(name: str, path: Path, seed: int) -> ParallelText:
    pairs: list[Pair] = []
    for number, line in enumerate(_lines(path), 1):
        fields = line.split("\t")  # english, german and, in newer editions, attribution
        if len(fields) < 2:
            raise Damaged(path, f"is corrupted (line {number:,} has no tab)")
        pairs.append((fields[1].strip(), fields[0].strip()))
    groups = _sharing_sentences(sorted(pairs))
    draw = random.Random(seed)
    draw.shuffle(groups)
    held = max(1, len(groups) // 50)
    splits = groups[2 * held :], groups[:held], groups[held : 2 * held]
    train, valid, test = ([pair for group in split for pair in group] for split in splits)
    for part in (train, valid, test):
        draw.shuffle(part)
    return ParallelText(name, train, valid, test)


def _sharing_sentences(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Put pairs together that share a sentence in either language, directly or through other pairs."""
    group_of: dict[tuple[int, str], list[Pair]] = {}  # by language and sentence
    for pair in pairs:
        german, english = (group_of.get(side, []) for side in enumerate(pair))
        group = [*german, *(english if english is not german else ()), pair]
        group_of.update((side, group) for member in group for side in enumerate(member))
    return list({id(group): group for group in group_of.values()}.values())
