from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.experiments.data.official import accept_small_files, cifar_bytes, write, write_mnist

from apo_experiments.data import images
from apo_experiments.data.registry import DATASETS
from apo_experiments.errors import UserError

DRAW = np.random.default_rng(1)


def pixels(count: int) -> np.ndarray:
    return DRAW.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_are_read_pixel_for_pixel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    accept_small_files(monkeypatch, name)
    written = write_mnist(tmp_path, name)
    loaded = images.load(name, tmp_path)
    assert loaded.train_images.shape == (20, 1, 28, 28) and loaded.train_images.dtype == torch.uint8
    np.testing.assert_array_equal(loaded.train_images[:, 0], written["train-images-idx3"])
    np.testing.assert_array_equal(loaded.test_images[:, 0], written["t10k-images-idx3"])
    np.testing.assert_array_equal(loaded.train_labels, written["train-labels-idx1"])
    np.testing.assert_array_equal(loaded.test_labels, written["t10k-labels-idx1"])
    assert loaded.train_labels.dtype == torch.int64 and loaded.classes == 10


def test_cifar10_reads_five_batches_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_small_files(monkeypatch, "cifar10")
    batches = [(pixels(4), DRAW.integers(0, 10, 4)) for _ in range(6)]
    for i, batch in enumerate(batches):
        file = "test_batch.bin" if i == 5 else f"data_batch_{i + 1}.bin"
        write(tmp_path / "cifar-10-batches-bin" / file, cifar_bytes(*batch))
    loaded = images.load("cifar10", tmp_path)
    np.testing.assert_array_equal(loaded.train_images, np.concatenate([x for x, _ in batches[:5]]))
    np.testing.assert_array_equal(loaded.train_labels, np.concatenate([y for _, y in batches[:5]]))
    np.testing.assert_array_equal(loaded.test_images, batches[5][0])
    np.testing.assert_array_equal(loaded.test_labels, batches[5][1])


def test_cifar100_takes_the_fine_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_small_files(monkeypatch, "cifar100")
    for part in ("train", "test"):
        content = cifar_bytes(pixels(3), np.array([19, 4, 0]), np.array([99, 55, 2]))
        write(tmp_path / f"cifar-100-binary/{part}.bin", content)
    loaded = images.load("cifar100", tmp_path)
    assert loaded.train_labels.tolist() == [99, 55, 2] and loaded.classes == 100


@pytest.mark.parametrize("compressed", [True, False])
def test_svhn_is_read_with_label_ten_as_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressed: bool) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    accept_small_files(monkeypatch, "svhn")
    (tmp_path / "svhn").mkdir()
    stored = DRAW.integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
    labels = np.array([[1], [10], [9], [10], [2]], np.uint8)
    for part in ("train", "test"):
        path = tmp_path / f"svhn/{part}_32x32.mat"
        scipy_io.savemat(path, {"X": stored, "y": labels}, do_compression=compressed)
    loaded = images.load("svhn", tmp_path)
    assert loaded.train_labels.tolist() == [1, 0, 9, 0, 2]
    assert loaded.train_images.shape == (5, 3, 32, 32)
    assert int(loaded.train_images[3, 2, 7, 11]) == stored[7, 11, 2, 3]
    np.testing.assert_array_equal(loaded.train_images, stored.transpose(3, 2, 0, 1))


def test_mean_and_std_are_those_of_float64_arithmetic() -> None:
    made = images.generated((3, 9, 7), train=5000, test=10)
    exact = made.train_images.double() / 255
    torch.testing.assert_close(torch.tensor(made.mean).double(), exact.mean((0, 2, 3)), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        torch.tensor(made.std).double(), exact.var((0, 2, 3), correction=0).sqrt(), rtol=0, atol=1e-6
    )


def damage_truncate(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def damage_truncate_inside(content: bytes) -> bytes:
    return gzip.compress(gzip.decompress(content)[:-5])


def damage_flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


def damage_magic(content: bytes) -> bytes:
    return gzip.compress(b"\1\2\3\4" + gzip.decompress(content))


@pytest.mark.parametrize("damage", [damage_truncate, damage_truncate_inside, damage_flip, damage_magic])
def test_a_damaged_idx_file_is_named_in_one_sentence(tmp_path, monkeypatch, damage) -> None:
    accept_small_files(monkeypatch, "mnist")
    write_mnist(tmp_path)
    path = tmp_path / "mnist/t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=re.escape(str(path))) as error:
        images.load("mnist", tmp_path)
    assert "apo data fetch mnist" in str(error.value) and "\n" not in str(error.value)


def test_labels_and_images_must_be_equally_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_small_files(monkeypatch, "mnist")
    write_mnist(tmp_path)
    other = tmp_path / "other"
    write_mnist(other, train=19)
    file = "mnist/train-labels-idx1-ubyte.gz"
    (tmp_path / file).write_bytes((other / file).read_bytes())
    with pytest.raises(UserError, match="19 labels for 20 images"):
        images.load("mnist", tmp_path)


def test_a_truncated_cifar_file_and_a_wrong_label_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_small_files(monkeypatch, "cifar100")
    good = cifar_bytes(pixels(2), np.zeros(2), np.zeros(2))
    write(tmp_path / "cifar-100-binary/test.bin", good)
    write(tmp_path / "cifar-100-binary/train.bin", good[:-1])
    with pytest.raises(UserError, match=r"train\.bin is truncated"):
        images.load("cifar100", tmp_path)
    write(tmp_path / "cifar-100-binary/train.bin", cifar_bytes(pixels(2), np.zeros(2), np.array([3, 100])))
    with pytest.raises(UserError, match=r"train\.bin is corrupted \(a label is 100"):
        images.load("cifar100", tmp_path)


@pytest.mark.parametrize("keep", [40, 128, 300, -9])
def test_a_truncated_matlab_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    accept_small_files(monkeypatch, "svhn")
    (tmp_path / "svhn").mkdir()
    arrays = {"X": DRAW.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8), "y": np.ones((4, 1), np.uint8)}
    for part in ("train", "test"):
        scipy_io.savemat(tmp_path / f"svhn/{part}_32x32.mat", arrays, do_compression=True)
    path = tmp_path / "svhn/train_32x32.mat"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=re.escape(str(path))):
        images.load("svhn", tmp_path)


def test_a_corrupted_matlab_file_never_reaches_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one of the right size: scipy can crash on it, which no sentence survives."""
    monkeypatch.setattr("scipy.io.loadmat", lambda path: pytest.fail(f"read {path}"))
    sizes = {file.path: file.size for file in DATASETS["svhn"].files}
    (tmp_path / "svhn").mkdir()
    for path, size in sizes.items():
        with open(tmp_path / path, "wb") as stream:
            stream.truncate(size)  # zeros, which take no room on most disks
    with pytest.raises(UserError, match=r"_32x32\.mat is corrupted or another edition"):
        images.load("svhn", tmp_path)


def test_an_official_checksum_is_enforced(tmp_path: Path) -> None:
    """With the real registry, files of the right form and other content are not MNIST."""
    write_mnist(tmp_path)
    with pytest.raises(UserError, match="sha256 differs"):
        images.load("mnist", tmp_path)


def test_loading_a_table_as_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not consist of images"):
        images.load("protein", tmp_path)


def test_generated_images_can_be_learned_and_depend_on_the_seed_alone() -> None:
    made = images.generated(train=400, test=200, seed=3)
    again = images.generated(train=400, test=200, seed=3)
    assert torch.equal(made.train_images, again.train_images) and torch.equal(made.test_images, again.test_images)
    assert not torch.equal(made.train_images, images.generated(train=400, test=200, seed=4).train_images)
    means = torch.stack([made.train_images[made.train_labels == k].float().mean(0) for k in range(10)])
    distances = torch.cdist(made.test_images.float().flatten(1), means.flatten(1))
    accuracy = (distances.argmin(1) == made.test_labels).double().mean()
    assert accuracy > 0.9, "the nearest class mean should tell most test images"


def test_split_holds_out_without_overlap_or_loss() -> None:
    made = images.generated((1, 6, 6), train=50, test=5)
    held = images.split(made, validation=20, seed=1)
    assert len(held.train_images) == 30 and len(held.test_images) == 20
    together = torch.cat([held.train_images, held.test_images]).flatten(1)
    assert torch.equal(together.unique(dim=0), made.train_images.flatten(1).unique(dim=0))
    rows = {tuple(row): int(k) for row, k in zip(made.train_images.flatten(1).tolist(), made.train_labels, strict=True)}
    for image, label in zip(held.test_images.flatten(1).tolist(), held.test_labels.tolist(), strict=True):
        assert rows[tuple(image)] == label
    assert torch.equal(images.split(made, 20, seed=1).test_labels, held.test_labels)
    assert not torch.equal(images.split(made, 20, seed=2).test_images, held.test_images)
    with pytest.raises(ValueError, match="validation must be from 1 to 49, got 50"):
        images.split(made, 50)


def test_subset_keeps_the_first_and_the_statistics() -> None:
    made = images.generated((1, 6, 6), train=50, test=9)
    small = images.subset(made, train=10, test=4)
    assert torch.equal(small.train_images, made.train_images[:10]) and torch.equal(
        small.test_labels, made.test_labels[:4]
    )
    assert small.mean == made.mean
    assert len(images.subset(made).test_labels) == 9
