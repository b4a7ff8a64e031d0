"""Readers of the official binary image formats: idx (MNIST), CIFAR's records, MATLAB 5 (SVHN).

None of them can execute anything: they read numbers. Each raises :class:`FormatError` on a file that is cut short
or makes no sense; the message completes "the file ...".
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

__all__ = ["FormatError", "read_idx", "read_cifar", "read_matlab"]


class FormatError(Exception):
    """A file that is not in the format it should be in."""


def read_idx(path: Path) -> np.ndarray:
    """Return the array of bytes in a gzip-compressed idx file.

    The file begins with two zero bytes, the type (8 for bytes), the number of axes and the length of each axis as
    a big-endian 32-bit number; the bytes follow in row-major order.

    Args:
        path: For example ``train-images-idx3-ubyte.gz``.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "labels.gz"
        >>> _ = path.write_bytes(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9])))
        >>> read_idx(path)
        array([7, 9], dtype=uint8)
    """
    try:
        with gzip.open(path) as stream:
            content = stream.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError("is truncated or corrupted (it does not unpack)") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise FormatError("is not an idx file of bytes")
    start = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != int(np.prod(shape, dtype=np.int64)):
        raise FormatError(f"is truncated or corrupted ({len(content) - start:,} bytes for the shape {shape})")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_cifar(path: Path, label_bytes: int = 1, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``[N, 3, 32, 32]`` and labels ``[N]``, both bytes, from a file of CIFAR's binary version.

    A record is the label (CIFAR-100: the coarse label, then the fine one) and 3,072 pixels, one colour plane after
    the other.

    Args:
        path: For example ``data_batch_1.bin``.
        label_bytes: 1 for CIFAR-10, 2 for CIFAR-100; the last of them is returned.
        classes: Labels must be smaller.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "batch.bin"
        >>> _ = path.write_bytes(bytes([7]) + bytes(3072))
        >>> images, labels = read_cifar(path)
        >>> images.shape, labels.tolist()
        ((1, 3, 32, 32), [7])
    """
    content = np.fromfile(path, np.uint8)
    record = label_bytes + 3072
    if content.size == 0 or content.size % record:
        raise FormatError(f"is truncated ({content.size:,} bytes are not whole records of {record:,})")
    records = content.reshape(-1, record)
    labels = records[:, label_bytes - 1]
    if int(labels.max()) >= classes:
        raise FormatError(f"is corrupted (a label is {int(labels.max())}, there are {classes} classes)")
    return np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, 3, 32, 32), labels.copy()


# Types of MATLAB's numeric data elements.
_NUMERIC = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_MATRIX, _COMPRESSED = 14, 15


def read_matlab(path: Path) -> dict[str, np.ndarray]:
    """Return the numeric arrays of a MATLAB 5 file by name.

    After a header of 128 bytes come data elements: a tag (type and length) and data, padded to eight bytes; an
    element may be a zlib stream that holds another. An array consists of its flags, its dimensions, its name and its
    numbers in column-major order. Other elements than real numeric arrays are passed over.

    Args:
        path: For example ``train_32x32.mat``.

    Example:
        >>> import io, tempfile, scipy.io
        >>> path = Path(tempfile.mkdtemp()) / "a.mat"
        >>> scipy.io.savemat(path, {"y": np.array([[1], [10]], np.uint8)}, do_compression=True)
        >>> read_matlab(path)["y"].ravel()
        array([ 1, 10], dtype=uint8)
    """
    content = memoryview(path.read_bytes())
    if len(content) < 128 or bytes(content[126:128]) != b"IM":
        raise FormatError("is not a MATLAB 5 file (little-endian)")
    try:
        return dict(_arrays(content[128:]))
    except (zlib.error, struct.error, ValueError, KeyError) as error:
        raise FormatError(f"is truncated or corrupted ({error})") from error


def _arrays(content: memoryview) -> Iterator[tuple[str, np.ndarray]]:
    for kind, data in _elements(content):
        if kind == _COMPRESSED:
            yield from _arrays(memoryview(zlib.decompress(data)))
        elif kind == _MATRIX:
            parts = list(_elements(data))
            if len(parts) == 4 and parts[3][0] in _NUMERIC:  # flags, dimensions, name, real part
                shape = np.frombuffer(parts[1][1], "<i4")
                numbers = np.frombuffer(parts[3][1], _NUMERIC[parts[3][0]])
                yield bytes(parts[2][1]).decode("ascii"), numbers.reshape(shape, order="F")


def _elements(content: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Walk through the data elements that lie one after the other."""
    position = 0
    while position < len(content):
        kind, size = struct.unpack_from("<II", content, position)
        if kind >> 16:  # the small form: type and length share four bytes, the data are the next four
            kind, size, start, step = kind & 0xFFFF, kind >> 16, position + 4, 8
        else:
            # Compressed elements are not padded, all others are.
            start, step = position + 8, 8 + (size if kind == _COMPRESSED else -(-size // 8) * 8)
        if start + size > len(content):
            raise ValueError(f"an element of {size:,} bytes ends after the file")
        yield kind, content[start : start + size]
        position += step
