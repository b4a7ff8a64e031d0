"""Small files in the official formats, and a registry that accepts them."""

from __future__ import annotations

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apo_experiments.data import registry


def accept_small_files(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Take sizes and checksums out of the registry for one test: what is left is the structure."""
    entry = registry.DATASETS[name]
    files = tuple(replace(file, size=None, checksum=None) for file in entry.files)
    monkeypatch.setitem(registry.DATASETS, name, replace(entry, files=files))


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def idx_bytes(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(root: Path, name: str = "mnist", train: int = 20, test: int = 6) -> dict[str, np.ndarray]:
    """Writes four idx files and returns what they hold."""
    draw = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", train), ("t10k", test)):
        arrays[f"{part}-images-idx3"] = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1"] = draw.integers(0, 10, count, dtype=np.uint8)
    for file, array in arrays.items():
        write(root / name / f"{file}-ubyte.gz", gzip.compress(idx_bytes(array)))
    return arrays


def cifar_bytes(images: np.ndarray, *labels: np.ndarray) -> bytes:
    columns = [label[:, None] for label in labels]
    return np.concatenate([*columns, images.reshape(len(images), -1)], axis=1).astype(np.uint8).tobytes()
