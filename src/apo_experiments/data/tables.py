"""Tables: three of the UCI collection and generated ones, for regression; and handwritten digits of 8 x 8 pixels."""

from __future__ import annotations

import csv
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from apo_experiments.data.locate import Damaged, directory, opened
from apo_experiments.data.registry import dataset
from apo_experiments.errors import UserError


@dataclass(frozen=True)
class Table:
    """Inputs ``[N, D]`` and targets ``[N, T]``, float32, of zero mean and unit variance (the paper, appendix B)."""

    name: str
    inputs: Tensor
    targets: Tensor


#: A copy of scikit-learn's own file of digits, for machines without scikit-learn, below the folder of the data.
DIGITS = "digits/digits.csv.gz"

#: Columns that are targets; and those that are no inputs either, since the patient must not be one.
_TARGETS = {"protein": ["RMSD"], "slice": ["reference"], "parkinsons": ["motor_UPDRS", "total_UPDRS"]}
_DROPPED = {"protein": [], "slice": ["patientId"], "parkinsons": ["subject#"]}


def load(name: str, data_dir: str | Path | None = None) -> Table:
    """Load a table of the UCI collection."""
    with opened(name, "tables", data_dir) as root:
        path = root / dataset(name).files[0].path
        header, rows = _read(path)
        special = _TARGETS[name] + _DROPPED[name]
        absent = [column for column in special if column not in header]
        if absent:
            raise Damaged(path, f"has no column {', '.join(absent)}")
    inputs = [place for place, column in enumerate(header) if column not in special]
    targets = [header.index(column) for column in _TARGETS[name]]
    return Table(name, _normalized(rows[:, inputs]), _normalized(rows[:, targets]))


def generated(rows: int = 256, inputs: int = 8, targets: int = 1, seed: int = 0) -> Table:
    """Generate a table whose targets are a smooth function of the inputs, with a little noise."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, inputs))
    y = np.tanh(x @ draw.standard_normal((inputs, 16))) @ draw.standard_normal((16, targets))
    return Table("generated", _normalized(x), _normalized(y + 0.05 * draw.standard_normal(y.shape)))


def digits(data_dir: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """Return the pixels, from 0 to 1, ``[1797, 64]``, and labels ``[1797]`` of the digits that scikit-learn carries.

    They are the test set of UCI's optical digits.

    Args:
        data_dir: Folder of the data, which is asked first; None as in :func:`apo_experiments.data.locate.directory`.

    Raises:
        UserError: There is neither the file nor scikit-learn.

    Example:
        >>> pixels, labels = digits()
        >>> pixels.shape, labels[:4].tolist()
        (torch.Size([1797, 64]), [0, 1, 2, 3])
    """
    path = directory(data_dir) / DIGITS
    if path.is_file():
        rows = np.loadtxt(path, delimiter=",", dtype=np.float32)
    else:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise UserError(
                f"The digits come with scikit-learn: pip install scikit-learn, or put its digits.csv.gz at {path}."
            ) from None
        found = load_digits()
        rows = np.column_stack([found.data, found.target]).astype(np.float32)  # type: ignore[attr-defined]
    return torch.from_numpy(rows[:, :-1] / 16), torch.from_numpy(rows[:, -1].astype(np.int64))


def _read(path: Path) -> tuple[list[str], np.ndarray]:
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        header = next(csv.reader(file), [])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # "no data": reported below
                rows = np.loadtxt(file, delimiter=",", ndmin=2)
        except ValueError as error:
            raise Damaged(path, f"is truncated or corrupted ({str(error).split(';')[0].rstrip('.')})") from error
    if rows.size == 0 or rows.shape[1] != len(header):
        raise Damaged(path, f"is truncated or corrupted (rows of {rows.shape[1]} for {len(header)} columns)")
    if not np.isfinite(rows).all():
        raise Damaged(path, "is corrupted (a number is not finite)")
    return header, rows


def _normalized(columns: np.ndarray) -> Tensor:
    """Return the columns with zero mean and unit variance; a constant column (Slice has some) becomes zero."""
    std = columns.std(axis=0)
    constant = np.ptp(columns, axis=0) == 0
    centred = np.where(constant, 0.0, columns - columns.mean(axis=0))
    return torch.from_numpy((centred / np.where(constant, 1.0, std)).astype(np.float32))
