"""Downloading data sets and verifying them.

Files are downloaded to a temporary folder inside the data directory and moved to their places only once they are
complete and verified. If anything goes wrong - no network, a full disk, Ctrl-C - the folder is removed and no
half-written file is left.
"""

from __future__ import annotations

import errno
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from apo_experiments.data import archives, locate
from apo_experiments.data.registry import DataFile, Dataset, Source, dataset
from apo_experiments.errors import UserError

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
    files = {file.path: file for file in entry.files}
    wanted = [
        source for source in entry.sources if any(locate.problem(files[path], root / path) for _, path in source.files)
    ]
    if not wanted and not verify(name, root):
        report(f"{name}: already in {root}")
        return
    if not entry.sources:
        raise UserError(f"The data set {name} cannot be downloaded by a program: {entry.by_hand}, below {root}.")
    try:
        root.mkdir(parents=True, exist_ok=True)
        for source in wanted or entry.sources:
            _fetch_source(entry, source, files, root, report)
    except OSError as error:
        if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
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


def _fetch_source(
    entry: Dataset, source: Source, files: dict[str, DataFile], root: Path, report: Callable[[str], None]
) -> None:
    """Download, check and unpack into a temporary folder; then move into place."""
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as folder:
        received = _download_any(entry, source, Path(folder) / "download", report)
        if source.unpack == "none":
            unpacked = {source.files[0][1]: received}
        else:
            unpacked = {path: Path(folder) / "unpacked" / path for _, path in source.files}
            try:
                archives.unpack(received, source.unpack, {member: unpacked[path] for member, path in source.files})
            except archives.ArchiveError as error:
                raise UserError(f"The archive {source.urls[0]} of {entry.name} {error}: try again later.") from error
        for path, temporary in unpacked.items():
            trouble = locate.problem(files[path], temporary)
            if trouble:
                what = trouble.removeprefix(str(temporary)).strip()
                raise UserError(f"{path} as downloaded from {source.urls[0]} {what}: try again later.")
        for path, temporary in unpacked.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, root / path)


def _download_any(entry: Dataset, source: Source, target: Path, report: Callable[[str], None]) -> Path:
    """Try the addresses in turn until a download has the right checksum."""
    reasons = []
    for url in source.urls:
        report(f"{entry.name}: {url}")
        try:
            _download(url, target, lambda line: report(f"{entry.name}: {line}"))
        except _DownloadError as error:
            reasons.append(f"{url}: {error}")
            continue
        if source.checksum is None or locate.digest(target, source.checksum) == source.checksum.digest:
            return target
        reasons.append(f"{url}: its {source.checksum.algorithm} is not the published one")
    raise UserError(
        f"The data set {entry.name} could not be downloaded ({'; '.join(reasons)}): check the connection and run "
        f"`apo data fetch {entry.name}` again, or {entry.by_hand}."
    )


class _DownloadError(Exception):
    """The server or the network failed; the message is the reason."""


def _download(url: str, target: Path, report: Callable[[str], None]) -> None:
    """Download a file, checked for completeness.

    In place of the package pooch, which has neither mirrors nor members of archives under other names.
    """
    # Some servers reject the library's default name.
    request = urllib.request.Request(url, headers={"User-Agent": "apo-optim"})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        raise _DownloadError(f"HTTP status {error.code}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _DownloadError(str(getattr(error, "reason", error))) from error
    with response, open(target, "wb") as file:
        total = int(response.headers.get("Content-Length") or 0)
        received, tenths = 0, 0
        while chunk := _read(response):
            file.write(chunk)  # outside of _read: a full disk is not a failing network
            received += len(chunk)
            if total and received * 10 // total > tenths:
                tenths = received * 10 // total
                report(f"{tenths * 10}% of {total / 1e6:.1f} MB")
    # A connection that closes early looks like the end of the file.
    if received < total:
        raise _DownloadError(f"the connection ended after {received:,} of {total:,} bytes")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _DownloadError(str(error) or type(error).__name__) from error
