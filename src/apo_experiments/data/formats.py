"""Readers of the official binary image formats: idx (MNIST), CIFAR's records, MATLAB 5 (SVHN).

They only read numbers and cannot execute anything. Each raises :class:`~apo_experiments.data.locate.Damaged` on a file
that is truncated or invalid; the message completes "the file ...". Checksums come first: scipy's reader can crash on a
damaged MATLAB file.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from pathlib import Path

import numpy as np

from apo_experiments.data.locate import Damaged
from apo_experiments.errors import required


def read_idx(path: Path) -> np.ndarray:
    """Return the array of bytes in a gzip-compressed idx file.

    The file begins with two zero bytes, the type (8 for bytes), the number of axes and the length of each axis as
    a big-endian 32-bit number; the bytes follow in row-major order.
    """
    try:
        with gzip.open(path) as stream:
            content = stream.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Damaged(path, "is truncated or corrupted (it does not unpack)") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise Damaged(path, "is not an idx file of bytes")
    start = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != int(np.prod(shape, dtype=np.int64)):
        raise Damaged(path, f"is truncated or corrupted ({len(content) - start:,} bytes for the shape {shape})")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_cifar(path: Path, label_bytes: int = 1, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``[N, 3, 32, 32]`` and labels ``[N]``, both bytes, from a file of CIFAR's binary version.

    A record is the label (CIFAR-100: the coarse label, then the fine one) and 3,072 pixels, one colour plane after
    the other.

    Args:
        path: For example ``data_batch_1.bin``.
        label_bytes: 1 for CIFAR-10, 2 for CIFAR-100; the last of them is returned.
        classes: Labels must be smaller.
    """
    content = np.fromfile(path, np.uint8)
    record = label_bytes + 3072
    if content.size == 0 or content.size % record:
        raise Damaged(path, f"is truncated ({content.size:,} bytes are not whole records of {record:,})")
    records = content.reshape(-1, record)
    labels = records[:, label_bytes - 1]
    if int(labels.max()) >= classes:
        raise Damaged(path, f"is corrupted (a label is {int(labels.max())}, there are {classes} classes)")
    return np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, 3, 32, 32), labels.copy()


def read_matlab(path: Path) -> dict[str, np.ndarray]:
    """Return the numeric arrays of a MATLAB 5 file by name."""
    loadmat = required("scipy.io").loadmat
    stored = io.BytesIO(path.read_bytes())  # so that an OSError below is about the content, not about the disk
    try:
        content = loadmat(stored)
    except Exception as error:  # a damaged file fails in scipy, zlib or numpy, each in its own way
        raise Damaged(
            path, f"is truncated or corrupted ({(str(error).splitlines() or [''])[0] or type(error).__name__})"
        ) from error
    return {
        name: array for name, array in content.items() if isinstance(array, np.ndarray) and array.dtype.kind in "iuf"
    }
