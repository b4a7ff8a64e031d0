"""The 1,797 handwritten digits of 8 x 8 pixels that scikit-learn carries (the test set of UCI's optical digits)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from apo_experiments.data.locate import directory
from apo_experiments.errors import UserError

#: A copy of scikit-learn's own file, for machines without scikit-learn, below the folder of the data.
FILE = "digits/digits.csv.gz"


def load(data_dir: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """Return pixels from 0 to 1, ``[1797, 64]``, and labels ``[1797]``.

    Args:
        data_dir: Folder of the data, which is asked first; None as in :func:`apo_experiments.data.locate.directory`.

    Raises:
        UserError: There is neither the file nor scikit-learn.

    Example:
        >>> pixels, labels = load()
        >>> pixels.shape, labels[:4].tolist()
        (torch.Size([1797, 64]), [0, 1, 2, 3])
    """
    path = directory(data_dir) / FILE
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
