"""Downloading data sets and verifying them.

Files are downloaded to a temporary folder inside the data directory and moved to their places only once they are
complete and verified. If anything goes wrong - no network, a full disk, Ctrl-C - the folder is removed and no
half-written file is left. (Not by the package pooch: it knows no mirrors, and unpacks to paths
that an archive chooses.)
"""

from __future__ import annotations

import gzip
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from apo_experiments.data import locate
from apo_experiments.data.registry import Dataset, Source, dataset
from apo_experiments.errors import UserError
from apo_experiments.files import FULL

_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 60.0


def fetch(name: str, data_dir: str | Path | None = None, report: Callable[[str], None] = print) -> None:
    """Download the files of a data set that are missing or damaged.

    Args:
        name: The data set.
        data_dir: Where it goes; None as in :func:`apo_experiments.data.locate.directory`.
        report: Receives lines on the progress.
    """
    entry, root = dataset(name), locate.directory(data_dir)
    bad = {file.path for file in entry.files if locate.problem(file, root / file.path)}
    wanted = [source for source in entry.sources if not bad.isdisjoint(source.paths)]
    if not wanted and not verify(name, root):
        report(f"{name}: already in {root}")
        return
    if not entry.sources:
        raise UserError(f"The data set {name} cannot be downloaded by a program: {entry.by_hand}, below {root}.")
    try:
        root.mkdir(parents=True, exist_ok=True)
        for source in wanted or entry.sources:
            _fetch_source(entry, source, root, report)
    except OSError as error:
        if error.errno in FULL:
            raise UserError(
                f"The disk that holds {root} is full, so {name} was not stored: free some space or name another folder "
                f"with --data-dir, then run `apo data fetch {name}` again."
            ) from error
        raise UserError(
            f"The data set {name} cannot be stored in {root} ({error.strerror or error}): name another folder with "
            "--data-dir or APO_DATA."
        ) from error
    problems = verify(name, root)
    if problems:
        raise UserError(f"The data set {name} was downloaded but {problems[0]}.")
    report(f"{name}: complete in {root}")


def verify(name: str, data_dir: str | Path | None = None) -> list[str]:
    """Return the problems of a data set on disk, one phrase each, or an empty list.

    Sizes and checksums are compared if the registry has them; for files without a checksum the loader is run,
    which verifies their structure.
    """
    entry, root = dataset(name), locate.directory(data_dir)
    problems = [locate.problem(file, root / file.path) for file in entry.files]
    found = [problem for problem in problems if problem]
    if not found and any(file.checksum is None for file in entry.files):
        # Imported here: the loaders are heavy, and they import this package's other modules.
        from apo_experiments.data import images, tables, text

        try:
            {"images": images.load, "tables": tables.load, "text": text.load}[entry.kind](name, root)
        except UserError as error:
            found.append(str(error).rstrip("."))
    return found


def _fetch_source(entry: Dataset, source: Source, root: Path, report: Callable[[str], None]) -> None:
    """Download, unpack and check in a temporary folder; then move into place."""
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as folder:
        received = Path(folder) / "download"
        _download(entry, source, received, report)
        try:
            unpacked = _unpacked(received, source)
        except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, KeyError) as error:
            what = f"lacks {error.args[0]}" if isinstance(error, KeyError) else f"is damaged ({error})"
            raise UserError(f"The archive {source.urls[0]} of {entry.name} {what}: try again later.") from error
        for file in entry.files:
            if file.path in unpacked and (trouble := locate.problem(file, unpacked[file.path])):
                what = trouble.removeprefix(str(unpacked[file.path])).strip()
                raise UserError(f"{file.path} as downloaded from {source.urls[0]} {what}: try again later.")
        for path, temporary in unpacked.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, root / path)


def _download(entry: Dataset, source: Source, target: Path, report: Callable[[str], None]) -> None:
    """Try the addresses in turn until a download is complete and has the right checksum."""
    reasons = []
    for url in source.urls:
        report(f"{entry.name}: {url}")
        try:
            reason = _download_from(url, target, lambda line: report(f"{entry.name}: {line}"))
        except urllib.error.HTTPError as error:
            reason = f"HTTP status {error.code}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, OSError) and error.errno in FULL:  # the disk, not the network
                raise
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        if not reason and source.checksum and locate.digest(target, source.checksum) != source.checksum.digest:
            reason = f"its {source.checksum.algorithm} is not the published one"
        if not reason:
            return
        reasons.append(f"{url}: {reason}")
    raise UserError(
        f"The data set {entry.name} could not be downloaded ({'; '.join(reasons)}): check the connection and run "
        f"`apo data fetch {entry.name}` again, or {entry.by_hand}."
    )


def _download_from(url: str, target: Path, report: Callable[[str], None]) -> str:
    """Download a file, and return how it is incomplete, or nothing."""
    # Some servers reject the library's default name.
    request = urllib.request.Request(url, headers={"User-Agent": "apo-optim"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response, open(target, "wb") as file:
        total = int(response.headers.get("Content-Length") or 0)
        received = tenths = 0
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            received += len(chunk)
            if total and received * 10 // total > tenths:
                tenths = received * 10 // total
                report(f"{tenths * 10}% of {total / 1e6:.1f} MB")
    # A connection that closes early looks like the end of the file.
    return f"the connection ended after {received:,} of {total:,} bytes" if received < total else ""


def _unpacked(archive: Path, source: Source) -> dict[str, Path]:
    """Copy the wanted members of an archive to files beside it, and return these by the paths that they are for.

    No path is taken from the archive, and only plain files, so it cannot write elsewhere.
    """
    if source.unpack == "none":
        return {source.paths[0]: archive}
    wanted, found = {PurePosixPath(path).name: path for path in source.paths}, dict[str, Path]()
    for name, stream in _content(archive, source):
        if (path := wanted.pop(PurePosixPath(name).name, None)) is not None:
            found[path] = archive.with_name(f"unpacked-{len(found)}")
            with stream, open(found[path], "wb") as file:
                shutil.copyfileobj(stream, file, 1 << 20)
    if wanted:
        raise KeyError(", ".join(wanted))
    return found


def _content(archive: Path, source: Source) -> Iterator[tuple[str, Any]]:
    """Yield the name of each plain file in an archive, in any folder, and its stream."""
    if source.unpack == "gzip":
        with gzip.open(archive) as stream:
            yield source.paths[0], stream  # the only one, whatever its name
    elif source.unpack == "tar":
        with tarfile.open(archive) as tar:
            yield from ((member.name, tar.extractfile(member)) for member in tar if member.isreg())
    else:
        with zipfile.ZipFile(archive) as packed:
            yield from ((name, packed.open(name)) for name in packed.namelist())
