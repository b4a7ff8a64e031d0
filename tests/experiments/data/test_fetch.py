from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from apo_experiments.data import registry
from apo_experiments.data.fetch import fetch, verify
from apo_experiments.data.registry import Checksum, DataFile, Dataset, Source
from apo_experiments.errors import UserError

CONTENT = b"RMSD,F1\n1,2\n3,4\n5,5\n" * 500


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; breaks the connection half-way below /broken."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if not self.path.startswith("/broken/"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: len(CONTENT) // 2])
        return None


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Yields the address of a server on this machine and the folder it serves."""
    folder = tmp_path / "site"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", folder
    server.shutdown()
    server.server_close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data"


def sha256(content: bytes) -> Checksum:
    return Checksum(hashlib.sha256(content).hexdigest())


def offer(monkeypatch: pytest.MonkeyPatch, *sources: Source, checksum: Checksum | None = None) -> None:
    """Registers a data set of one file for each path of the sources."""
    files = tuple(DataFile(path, None, checksum) for source in sources for path in source.paths)
    entry = Dataset("toy", "A toy", "tables", files, sources, "none", "draw it yourself")
    monkeypatch.setitem(registry.DATASETS, "toy", entry)


def left_in(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_a_plain_file_is_fetched_verified_and_not_fetched_twice(site, root, monkeypatch) -> None:
    address, folder = site
    (folder / "a.csv").write_bytes(CONTENT)
    offer(monkeypatch, Source((f"{address}/a.csv",), ("uci/a.csv",)), checksum=sha256(CONTENT))
    assert verify("toy", root) == [f"{root / 'uci/a.csv'} is missing"]
    lines: list[str] = []
    fetch("toy", root, lines.append)
    assert (root / "uci/a.csv").read_bytes() == CONTENT and left_in(root) == ["uci/a.csv"]
    assert verify("toy", root) == []
    assert any("100%" in line for line in lines) and "complete" in lines[-1]
    (folder / "a.csv").unlink()
    fetch("toy", root, lines.append)
    assert "already" in lines[-1]


def test_a_damaged_file_is_fetched_again(site, root, monkeypatch) -> None:
    address, folder = site
    (folder / "a.csv").write_bytes(CONTENT)
    offer(monkeypatch, Source((f"{address}/a.csv",), ("a.csv",)), checksum=sha256(CONTENT))
    root.mkdir()
    (root / "a.csv").write_bytes(CONTENT[:-3])
    assert "corrupted" in verify("toy", root)[0]
    fetch("toy", root, lambda line: None)
    assert verify("toy", root) == []


def make_archive(kind: str, members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    if kind == "gzip":
        return gzip.compress(next(iter(members.values())))
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return buffer.getvalue()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["tar", "zip", "gzip"])
def test_archives_yield_their_wanted_members_alone(site, root, monkeypatch, kind) -> None:
    address, folder = site
    packed = make_archive(kind, {"toy/a.csv" if kind == "tar" else "a.csv": CONTENT, "toy/readme.html": b"hello"})
    (folder / "packed").write_bytes(packed)
    offer(
        monkeypatch,
        Source((f"{address}/packed",), ("deep/er/a.csv",), kind, sha256(packed)),
        checksum=sha256(CONTENT),
    )
    fetch("toy", root, lambda line: None)
    assert left_in(root) == ["deep/er/a.csv"]


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("evil", ["../evil.txt", "/evil.txt", "toy/../../evil.txt", "C:\\evil.txt"])
def test_an_archive_cannot_write_elsewhere(tmp_path, site, root, monkeypatch, kind: str, evil: str) -> None:
    address, folder = site
    (folder / "packed").write_bytes(make_archive(kind, {evil: b"evil", "a.csv": CONTENT}))
    source = Source((f"{address}/packed",), ("a.csv",), kind)
    offer(monkeypatch, source, checksum=sha256(CONTENT))
    fetch("toy", root, lambda line: None)
    assert left_in(tmp_path) == ["data/a.csv", "site/packed"]


def test_a_link_in_place_of_a_wanted_file_is_refused(site, root, monkeypatch) -> None:
    address, folder = site
    with tarfile.open(folder / "packed", "w:gz") as archive:
        link = tarfile.TarInfo("a.csv")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    offer(monkeypatch, Source((f"{address}/packed",), ("a.csv",), "tar"))
    with pytest.raises(UserError, match=r"lacks a\.csv"):
        fetch("toy", root, lambda line: None)


@pytest.mark.parametrize("kind", ["tar", "zip", "gzip"])
def test_a_damaged_archive_leaves_nothing_behind(site, root, monkeypatch, kind) -> None:
    address, folder = site
    packed = make_archive(kind, {"a.csv": os.urandom(5000)})
    (folder / "packed").write_bytes(packed[: len(packed) // 2])
    offer(monkeypatch, Source((f"{address}/packed",), ("a.csv",), kind))
    with pytest.raises(UserError, match="is damaged"):
        fetch("toy", root, lambda line: None)
    assert left_in(root) == [] and list(root.iterdir()) == []


def test_a_missing_member_is_named(site, root, monkeypatch) -> None:
    address, folder = site
    (folder / "packed").write_bytes(make_archive("zip", {"b.csv": CONTENT}))
    offer(monkeypatch, Source((f"{address}/packed",), ("a.csv",), "zip"))
    with pytest.raises(UserError, match=r"lacks a\.csv"):
        fetch("toy", root, lambda line: None)


def test_a_wrong_checksum_is_refused_and_nothing_is_left(site, root, monkeypatch) -> None:
    address, folder = site
    (folder / "a.csv").write_bytes(CONTENT)
    source = Source((f"{address}/a.csv",), ("a.csv",))
    offer(monkeypatch, source, checksum=sha256(b"other"))
    with pytest.raises(UserError, match=r"a\.csv as downloaded from .* is corrupted"):
        fetch("toy", root, lambda line: None)
    assert list(root.iterdir()) == []
    offer(monkeypatch, Source(source.urls, source.paths, checksum=sha256(b"other")))
    with pytest.raises(UserError, match="is not the published one"):
        fetch("toy", root, lambda line: None)
    assert list(root.iterdir()) == []


def test_a_mirror_steps_in_for_a_broken_connection_and_a_missing_page(site, root, monkeypatch) -> None:
    address, folder = site
    (folder / "a.csv").write_bytes(CONTENT)
    urls = (f"{address}/broken/a.csv", f"{address}/none.csv", f"{address}/a.csv")
    offer(monkeypatch, Source(urls, ("a.csv",)), checksum=sha256(CONTENT))
    fetch("toy", root, lambda line: None)
    assert (root / "a.csv").read_bytes() == CONTENT


def test_no_mirror_left_is_one_sentence_with_every_reason(site, root, monkeypatch) -> None:
    address, _ = site
    urls = (f"{address}/broken/a.csv", f"{address}/none.csv", "http://127.0.0.1:9/a.csv")
    offer(monkeypatch, Source(urls, ("a.csv",)))
    with pytest.raises(UserError) as error:
        fetch("toy", root, lambda line: None)
    message = str(error.value)
    assert f"ended after {len(CONTENT) // 2:,} of {len(CONTENT):,} bytes" in message
    assert "HTTP status 404" in message and "127.0.0.1:9" in message and "draw it yourself" in message
    assert "\n" not in message and list(root.iterdir()) == []


@pytest.mark.parametrize("moment", ["download", "unpack", "move"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing_behind(site, root, monkeypatch, moment) -> None:
    address, folder = site
    (folder / "packed").write_bytes(make_archive("zip", {"a.csv": CONTENT}))
    offer(monkeypatch, Source((f"{address}/packed",), ("a.csv",), "zip"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if moment == "move":
        monkeypatch.setattr(os, "replace", full)
    else:
        real = open

        class FullFile(io.BytesIO):
            def write(self, *_: object) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

        def open_full(path, mode="r", *rest, **options):
            if Path(path).name.startswith(moment) and "w" in mode:
                real(path, mode).close()
                return FullFile()
            return real(path, mode, *rest, **options)

        monkeypatch.setattr("builtins.open", open_full)
    with pytest.raises(UserError, match="is full, so toy was not stored") as error:
        fetch("toy", root, lambda line: None)
    assert "\n" not in str(error.value)
    assert list(root.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    offer(monkeypatch, Source(("http://127.0.0.1:9/a.csv",), ("a.csv",)))
    with pytest.raises(UserError, match="cannot be stored in"):
        fetch("toy", tmp_path / "file" / "data", lambda line: None)


def test_verify_reads_the_structure_of_files_without_checksum(root: Path) -> None:
    (root / "de-en").mkdir(parents=True)
    (root / "de-en/deu.txt").write_text("Hi.\tHallo!\nRun!\tLauf!\nGo.\tGeh.\n")
    assert verify("tatoeba", root) == []
    (root / "de-en/deu.txt").write_text("Hi.\tHallo!\nRun!\n")
    assert "line 2 has no tab" in verify("tatoeba", root)[0]
