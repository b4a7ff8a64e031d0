from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.experiments.data.official import accept_small_files, write

from apo_experiments.data import tables
from apo_experiments.errors import UserError

PARKINSONS = "subject#,age,sex,test_time,motor_UPDRS,total_UPDRS,NHR,HNR"
HEADERS = {
    "protein": ("uci/CASP.csv", '"RMSD","F1","F2","F3"'),
    "parkinsons": ("uci/parkinsons_updrs.data", PARKINSONS),
    "slice": ("uci/slice_localization_data.csv", "patientId,value0,value1,value2,reference"),
}


def write_table(root: Path, name: str, rows: int = 12) -> np.ndarray:
    file, header = HEADERS[name]
    numbers = np.random.default_rng(2).normal(5, 3, (rows, header.count(",") + 1)).round(4)
    lines = [header, *(",".join(map(str, row)) for row in numbers)]
    write(root / file, ("\n".join(lines) + "\n").encode())
    return numbers


def normal(columns: np.ndarray) -> np.ndarray:
    return (columns - columns.mean(0)) / columns.std(0)


@pytest.mark.parametrize(
    ("name", "inputs", "targets"),
    [("protein", [1, 2, 3], [0]), ("parkinsons", [1, 2, 3, 6, 7], [4, 5]), ("slice", [1, 2, 3], [4])],
)
def test_columns_go_where_they_belong_normalized(tmp_path, monkeypatch, name, inputs, targets) -> None:
    accept_small_files(monkeypatch, name)
    numbers = write_table(tmp_path, name)
    table = tables.load(name, tmp_path)
    assert table.inputs.dtype == table.targets.dtype == torch.float32
    np.testing.assert_allclose(table.inputs, normal(numbers[:, inputs]), atol=1e-6)
    np.testing.assert_allclose(table.targets, normal(numbers[:, targets]), atol=1e-6)


def test_a_constant_column_becomes_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_small_files(monkeypatch, "protein")
    write(tmp_path / "uci/CASP.csv", b"RMSD,F1,F2\n1,0.1,3\n2,0.1,5\n4,0.1,9\n")
    table = tables.load("protein", tmp_path)
    assert table.inputs[:, 0].tolist() == [0, 0, 0]
    assert bool(table.inputs.isfinite().all())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"RMSD,F1\n1,2\n3", "truncated or corrupted"),
        (b"RMSD,F1\n1,2\n3,x\n", "truncated or corrupted"),
        (b"RMSD,F1\n1,2,3\n4,5,6\n", "rows of 3 for 2 columns"),
        (b"RMSD,F1\n1,nan\n4,5\n", "not finite"),
        (b"F0,F1\n1,2\n4,5\n", "no column RMSD"),
        (b"RMSD,F1\n", "truncated or corrupted"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_damaged_table_is_named_in_one_sentence(tmp_path, monkeypatch, content, complaint) -> None:
    accept_small_files(monkeypatch, "protein")
    path = write(tmp_path / "uci/CASP.csv", content)
    with pytest.raises(UserError, match=complaint) as error:
        tables.load("protein", tmp_path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_generated_tables_are_normalized_and_can_be_learned() -> None:
    table = tables.generated(rows=400, inputs=4, targets=2, seed=5)
    for columns in (table.inputs, table.targets):
        torch.testing.assert_close(columns.mean(0), torch.zeros(columns.shape[1]), rtol=0, atol=1e-5)
        torch.testing.assert_close(columns.std(0, correction=0), torch.ones(columns.shape[1]), rtol=0, atol=1e-5)
    assert torch.equal(table.targets, tables.generated(400, 4, 2, seed=5).targets)
    linear = torch.linalg.lstsq(table.inputs, table.targets).solution
    assert (table.inputs @ linear - table.targets).square().mean() < 0.6, "a linear model should explain a part"
