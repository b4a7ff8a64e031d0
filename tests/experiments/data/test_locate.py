from __future__ import annotations

from pathlib import Path

import pytest
from tests.experiments.data.official import accept_small_files, write, write_mnist

from apo_experiments.data import locate, registry
from apo_experiments.data.registry import Checksum, DataFile
from apo_experiments.errors import UserError


def test_the_argument_goes_before_the_variable_and_the_variable_before_the_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("APO_DATA", str(tmp_path / "variable"))
    assert locate.directory(tmp_path / "argument") == tmp_path / "argument"
    assert locate.directory() == tmp_path / "variable"
    monkeypatch.delenv("APO_DATA")
    assert locate.directory() == Path.home() / ".cache" / "apo-data"


def test_missing_data_are_one_sentence_with_place_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        locate.require("mnist", tmp_path)
    message = str(error.value)
    assert str(tmp_path) in message and "mnist/train-images-idx3-ubyte.gz" in message and "and 1 more" in message
    assert "`apo data fetch mnist`" in message and "--data-dir or APO_DATA" in message
    assert message.endswith(".") and "\n" not in message
    with pytest.raises(UserError) as error:
        locate.require("iwslt14", tmp_path)
    assert "apo data fetch" not in str(error.value), "it cannot be fetched"


def test_data_are_here_missing_incomplete_or_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate.state("mnist", tmp_path) == "missing"
    write_mnist(tmp_path)
    assert locate.state("mnist", tmp_path) == "here"
    assert locate.state("mnist", tmp_path, thorough=True) == "damaged", "these are not the official images"
    (tmp_path / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    assert locate.state("mnist", tmp_path) == "incomplete"
    write(tmp_path / "uci/CASP.csv", b"short")
    assert locate.state("protein", tmp_path) == locate.state("protein", tmp_path, thorough=True) == "damaged"
    accept_small_files(monkeypatch, "protein")
    assert locate.state("protein", tmp_path) == locate.state("protein", tmp_path, thorough=True) == "here"


def test_truncated_corrupted_and_empty_files_are_told_apart(tmp_path: Path) -> None:
    file = DataFile("a", 3, Checksum("900150983cd24fb0d6963f7d28e17f72", "md5"))
    path = write(tmp_path / "a", b"abc")
    assert locate.problem(file, path) is None
    path.write_bytes(b"ab")
    assert "truncated (2 of 3 bytes)" in str(locate.problem(file, path))
    path.write_bytes(b"abcd")
    assert "not the official file" in str(locate.problem(file, path))
    path.write_bytes(b"abd")
    assert "corrupted" in str(locate.problem(file, path))
    path.write_bytes(b"")
    assert "empty" in str(locate.problem(DataFile("a"), path))
    assert "does not unpack" in str(
        locate.problem(DataFile("a", None, Checksum("00", of_content=True)), write(path, b"no gzip"))
    )


def test_the_registry_is_consistent() -> None:
    for name, entry in registry.DATASETS.items():
        assert entry.name == name and entry.kind in ("images", "tables", "text")
        paths = [file.path for file in entry.files]
        assert all(not path.startswith("/") and ".." not in path for path in paths)
        delivered = [path for source in entry.sources for path in source.paths]
        assert not delivered or sorted(delivered) == sorted(paths), f"the sources of {name} are not its files"
        for file in entry.files:
            if file.checksum:
                assert len(file.checksum.digest) == {"sha256": 64, "md5": 32}[file.checksum.algorithm]
        for source in entry.sources:
            assert source.urls and all(url.startswith(("https://", "http://")) for url in source.urls)


def test_an_unknown_data_set_lists_what_there_is() -> None:
    with pytest.raises(UserError, match="choose one of mnist, fashion-mnist, cifar10"):
        registry.dataset("zzz")
