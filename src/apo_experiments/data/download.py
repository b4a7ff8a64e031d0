"""One download, checked for completeness.

Forty lines in place of the package pooch, which has neither mirrors nor members of archives under other names.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 60.0


class DownloadError(Exception):
    """The server or the network failed; the message is the reason."""


def download(url: str, target: Path, report: Callable[[str], None]) -> None:
    """Download a file to ``target``, in a folder that exists."""
    # Some servers reject the library's default name.
    request = urllib.request.Request(url, headers={"User-Agent": "apo-optim"})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        raise DownloadError(f"HTTP status {error.code}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DownloadError(str(getattr(error, "reason", error))) from error
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
        raise DownloadError(f"the connection ended after {received:,} of {total:,} bytes")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise DownloadError(str(error) or type(error).__name__) from error
