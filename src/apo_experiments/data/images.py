"""Sets of images for classification: MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100, SVHN, and generated ones.

The readers of the official binary formats only read numbers and cannot execute anything. Each raises
:class:`~apo_experiments.data.locate.Damaged` on a file that is truncated or invalid. Checksums come first: scipy's
reader can crash on a damaged MATLAB file.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from apo_experiments.data.locate import Damaged, opened
from apo_experiments.errors import required


@dataclass(frozen=True)
class ImageSet:
    """Labelled images, as bytes, on the CPU.

    Attributes:
        name: Of the data set.
        train_images: ``[N, C, H, W]``, uint8.
        train_labels: ``[N]``, int64.
        test_images: ``[M, C, H, W]``, uint8.
        test_labels: ``[M]``, int64.
        classes: How many there are.
        mean: Of each channel of the training images, with pixels in [0, 1].
        std: Standard deviation of the same.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load(name: str, data_dir: str | Path | None = None) -> ImageSet:
    """Load an official data set."""
    with opened(name, "images", data_dir) as root:
        if name in ("mnist", "fashion-mnist"):
            train, test = (_load_idx(root / name, part) for part in ("train", "t10k"))
        elif name == "cifar10":
            batches = [_load_cifar(root / f"cifar-10-batches-bin/data_batch_{i}.bin", 1, 10) for i in range(1, 6)]
            train = (torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches]))
            test = _load_cifar(root / "cifar-10-batches-bin/test_batch.bin", 1, 10)
        elif name == "cifar100":
            train, test = (_load_cifar(root / f"cifar-100-binary/{part}.bin", 2, 100) for part in ("train", "test"))
        else:
            train, test = (_load_svhn(root / f"svhn/{part}_32x32.mat") for part in ("train", "test"))
        return _image_set(name, *train, *test, classes=100 if name == "cifar100" else 10)


def generated(
    shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10, train: int = 512, test: int = 256, seed: int = 0
) -> ImageSet:
    """Generate images that can be learned: each class is a smooth pattern, shifted by up to two pixels, with noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(classes, shape[0], 4, 4, generator=generator)
    patterns = F.interpolate(coarse, size=shape[1:], mode="bilinear", align_corners=False)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % classes
        shifts = torch.randint(-2, 3, (count, 2), generator=generator).tolist()
        moved = [patterns[k].roll(s, dims=(1, 2)) for k, s in zip(labels.tolist(), shifts, strict=True)]
        images = torch.stack(moved) + 0.5 * torch.randn(count, *shape, generator=generator)
        return (128 + 48 * images).clamp(0, 255).to(torch.uint8), labels

    return _image_set("generated", *draw(train), *draw(test), classes=classes)


def split(images: ImageSet, validation: int = 5000, seed: int = 0) -> ImageSet:
    """Hold out training images for choosing hyperparameters (the paper: 5,000 of CIFAR).

    Returns:
        A set whose training images are the rest and whose *test* images are those held out, so that hyperparameters
        can be chosen without looking at the true test images. Mean and deviation stay those of the whole set.
    """
    count = len(images.train_labels)
    if not 0 < validation < count:
        raise ValueError(f"validation must be from 1 to {count - 1}, got {validation}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held, rest = order[:validation], order[validation:].sort().values
    train, test = ((images.train_images[part], images.train_labels[part]) for part in (rest, held))
    return replace(images, train_images=train[0], train_labels=train[1], test_images=test[0], test_labels=test[1])


def subset(images: ImageSet, train: int | None = None, test: int | None = None) -> ImageSet:
    """Keep only the first images, for a smaller experiment; None keeps all. Mean and deviation are unchanged."""
    return replace(
        images,
        train_images=images.train_images[:train],
        train_labels=images.train_labels[:train],
        test_images=images.test_images[:test],
        test_labels=images.test_labels[:test],
    )


def _labelled(path: Path, images: np.ndarray, labels: np.ndarray, classes: int) -> tuple[Tensor, Tensor]:
    if len(images) != len(labels):
        raise Damaged(path, f"has {len(labels):,} labels for {len(images):,} images")
    if len(labels) == 0 or int(labels.max()) >= classes:
        raise Damaged(path, f"is corrupted (a label is {labels.max(initial=0)}, there are {classes} classes)")
    return torch.from_numpy(np.array(images, np.uint8)), torch.from_numpy(labels.astype(np.int64))


def _load_idx(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    image_file, label_file = (folder / f"{part}-{what}-ubyte.gz" for what in ("images-idx3", "labels-idx1"))
    return _labelled(label_file, _read_idx(image_file, axes=3)[:, None], _read_idx(label_file, axes=1), 10)


def _read_idx(path: Path, axes: int) -> np.ndarray:
    """Return the array of bytes in a gzip-compressed idx file.

    The file begins with two zero bytes, the type (8 for bytes), the number of axes and the length of each axis as
    a big-endian 32-bit number; the bytes follow in row-major order.
    """
    try:
        with gzip.open(path) as stream:
            content = stream.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Damaged(path, "is truncated or corrupted (it does not unpack)") from error
    start = 4 + 4 * axes
    if len(content) < start or content[:3] != b"\0\0\x08":
        raise Damaged(path, "is not an idx file of bytes")
    if content[3] != axes:
        raise Damaged(path, "has the wrong number of axes")
    shape = struct.unpack(f">{axes}I", content[4:start])
    if len(content) - start != int(np.prod(shape, dtype=np.int64)):
        raise Damaged(path, f"is truncated or corrupted ({len(content) - start:,} bytes for the shape {shape})")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _load_cifar(path: Path, label_bytes: int, classes: int) -> tuple[Tensor, Tensor]:
    """Read a file of CIFAR's binary version.

    A record is the label (CIFAR-100: the coarse label, then the fine one, which counts) and 3,072 pixels, one colour
    plane after the other.
    """
    content = np.fromfile(path, np.uint8)
    record = label_bytes + 3072
    if content.size == 0 or content.size % record:
        raise Damaged(path, f"is truncated ({content.size:,} bytes are not whole records of {record:,})")
    records = content.reshape(-1, record)
    return _labelled(path, records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1], classes)


def _load_svhn(path: Path) -> tuple[Tensor, Tensor]:
    """Read a MATLAB 5 file."""
    loadmat = required("scipy.io").loadmat
    stored = io.BytesIO(path.read_bytes())  # so that an OSError below is about the content, not about the disk
    try:
        content = loadmat(stored)
    except Exception as error:  # a damaged file fails in scipy, zlib or numpy, each in its own way
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise Damaged(path, f"is truncated or corrupted ({reason})") from error
    pixels, labels = (content.get(name, np.empty(0)) for name in ("X", "y"))
    if pixels.ndim != 4 or pixels.dtype != np.uint8 or labels.size == 0 or labels.dtype.kind not in "iuf":
        raise Damaged(path, "has no images X of bytes and labels y")
    # MATLAB counts from one: the digit 0 has the label 10.
    return _labelled(path, pixels.transpose(3, 2, 0, 1), labels.reshape(-1) % 10, 10)


def _image_set(name: str, images: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor, classes: int) -> ImageSet:
    """Add mean and standard deviation of each channel, from how often each of the 256 values occurs."""
    values = torch.arange(256, dtype=torch.float64) / 255
    channels = [torch.bincount(images[:, c].reshape(-1), minlength=256).double() for c in range(images.shape[1])]
    shares = torch.stack([counts / counts.sum() for counts in channels])
    mean = shares @ values
    std = (shares * (values - mean[:, None]).square()).sum(1).sqrt()
    return ImageSet(name, images, labels, test, test_labels, classes, tuple(mean.tolist()), tuple(std.tolist()))
