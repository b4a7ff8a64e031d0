from __future__ import annotations

from pathlib import Path

import pytest
from tests.experiments.data.official import accept_small_files, write

from apo_experiments.data import text
from apo_experiments.errors import UserError


def write_parallel(root: Path, name: str, parts: tuple[str, ...]) -> None:
    for part in parts:
        for language in ("de", "en"):
            lines = "".join(f"{part} Satz {i} {language} ü\u2028x \n" for i in range(3))
            write(root / "de-en" / name / f"{part}.{language}", lines.encode())


@pytest.mark.parametrize(
    ("name", "parts"),
    [("multi30k", ("train", "val", "test_2016_flickr")), ("iwslt14", ("train", "valid", "test"))],
)
def test_parallel_files_are_paired_line_by_line(tmp_path, monkeypatch, name, parts) -> None:
    accept_small_files(monkeypatch, name)
    write_parallel(tmp_path, name, parts)
    loaded = text.load(name, tmp_path)
    # The line separator U+2028 inside of a sentence does not end it.
    assert loaded.train[1] == ("train Satz 1 de ü\u2028x", "train Satz 1 en ü\u2028x")
    assert loaded.valid[0][0].startswith(parts[1]) and loaded.test[2][1].startswith(parts[2])
    assert [len(split) for split in (loaded.train, loaded.valid, loaded.test)] == [3, 3, 3]


def test_sides_of_different_length_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_small_files(monkeypatch, "iwslt14")
    write_parallel(tmp_path, "iwslt14", ("train", "valid", "test"))
    write(tmp_path / "de-en/iwslt14/valid.en", b"one\ntwo\n")
    with pytest.raises(UserError, match=r"valid\.en has 2 lines for 3 in valid\.de: replace it"):
        text.load("iwslt14", tmp_path)


def tatoeba(root: Path, columns: int = 2, sentences: int = 300) -> None:
    credit = "\tCC-BY 2.0 (France)" if columns == 3 else ""
    lines = [f"English {i}.\tDeutsch {i} {j}.{credit}\n" for i in range(sentences) for j in range(1 + i % 3)]
    write(root / "de-en/deu.txt", "".join(lines).encode())


@pytest.mark.parametrize("columns", [2, 3])
def test_tatoeba_puts_no_english_sentence_into_two_splits(tmp_path, columns) -> None:
    tatoeba(tmp_path, columns)
    loaded = text.load("tatoeba", tmp_path)
    english = [{target for _, target in split} for split in (loaded.train, loaded.valid, loaded.test)]
    assert [len(side) for side in english] == [288, 6, 6]
    assert not english[0] & english[1] and not english[0] & english[2] and not english[1] & english[2]
    pairs = {*loaded.train, *loaded.valid, *loaded.test}
    assert pairs == {(f"Deutsch {i} {j}.", f"English {i}.") for i in range(300) for j in range(1 + i % 3)}


def test_tatoeba_puts_no_german_sentence_into_two_splits_either(tmp_path: Path) -> None:
    # In each story the middle sentence shares one translation with the first and one with the last.
    shared = [("first", "Anfang"), ("last", "Ende"), ("middle", "Anfang"), ("middle", "Ende")]
    lines = [f"{story} {english}\t{story} {german}\n" for english, german in shared for story in range(100)]
    write(tmp_path / "de-en/deu.txt", "".join(lines).encode())
    loaded = text.load("tatoeba", tmp_path)
    assert [len(split) for split in (loaded.train, loaded.valid, loaded.test)] == [4 * 96, 4 * 2, 4 * 2]
    stories = [{german.split()[0] for german, _ in split} for split in (loaded.train, loaded.valid, loaded.test)]
    assert [len(split) for split in stories] == [96, 2, 2] and len(set.union(*stories)) == 100


def test_tatoeba_is_shuffled_by_the_seed(tmp_path: Path) -> None:
    tatoeba(tmp_path)
    first = text.load("tatoeba", tmp_path, seed=0)
    assert first == text.load("tatoeba", tmp_path, seed=0)
    assert first.test != text.load("tatoeba", tmp_path, seed=1).test
    numbers = [int(target.split()[1].rstrip(".")) for _, target in first.train]
    assert numbers != sorted(numbers)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"Hi.\tHallo!\nRun!\tLau", "truncated"),
        (b"Hi.\tHallo!\nRun!\n", "line 2 has no tab"),
        (b"Hi.\tHallo!\nGr\xfc\n", "no UTF-8 at byte 13"),
    ],
)
def test_a_damaged_text_is_named(tmp_path, content, complaint) -> None:
    path = write(tmp_path / "de-en/deu.txt", content)
    with pytest.raises(UserError, match=complaint) as error:
        text.load("tatoeba", tmp_path)
    assert str(path) in str(error.value)


def test_the_generated_language_is_a_function_of_the_source() -> None:
    made = text.generated(train=200, valid=20, test=20, words=12, seed=7)
    assert made == text.generated(train=200, valid=20, test=20, words=12, seed=7)
    meaning: dict[str, str] = {}
    for source, target in made.train + made.valid + made.test:
        words, translated = source.split(), target.split()
        for german, english in zip((words[0], words[-1], *words[1:-1]), translated, strict=True):
            assert meaning.setdefault(german, english) == english
    assert len(meaning) == len(set(meaning.values())) == 12
    sources = [source for source, _ in made.train + made.valid + made.test]
    assert len(set(sources)) == 240, "a sentence is in two splits"
    with pytest.raises(ValueError, match=r"words must be .*, got 1"):
        text.generated(words=1)
