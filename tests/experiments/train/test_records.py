from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tests.experiments.train import tiny

from apo_experiments import records
from apo_experiments.errors import UserError
from apo_experiments.records import NAME, RecordWriter, find, read


def test_a_record_comes_back_as_it_was_written(tmp_path):
    config = tiny.config(hyper={"lr": 0.1, "betas": [0.9, 0.98], "warm_start": None})
    writer = RecordWriter(tmp_path, config)
    writer.append({"step": 5, "train_loss": 1 / 3, "nested": {"x": [1, 2.5]}})
    writer.finish({"metrics": {"loss": 0.1 + 0.2}})
    record = read(tmp_path / NAME)
    assert record.config == config and record.config.identity() == config.identity()
    assert record.rows == [{"kind": "row", "step": 5, "train_loss": 1 / 3, "nested": {"x": [1, 2.5]}}]
    assert record.summary is not None and record.summary["metrics"]["loss"] == 0.1 + 0.2
    assert record.finished


def test_the_header_tells_where_the_run_comes_from(tmp_path):
    RecordWriter(tmp_path, tiny.config())
    header = read(tmp_path / NAME).header
    assert header.keys() == {"kind", "config", "command", "commit", "versions", "hardware", "started"}
    assert header["versions"]["torch"] == torch.__version__
    assert header["hardware"].keys() == {"device", "cpu", "threads"}


def test_tuples_and_paths_of_a_config_find_their_run_again(tmp_path):
    config = tiny.config(hyper={"betas": (0.9, 0.98)}, options={"file": Path("somewhere")})
    RecordWriter(tmp_path, config)
    assert read(tmp_path / NAME).config.identity() == config.identity()


def test_every_line_is_strict_json_whatever_the_numbers(tmp_path):
    writer = RecordWriter(tmp_path, tiny.config())
    writer.append(
        {"step": 1, "a": math.nan, "b": -math.inf, "c": torch.tensor([1.0, math.inf]), "d": True, "e": (1, 2)}
    )

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / NAME).read_text().splitlines()]
    assert lines[1] == {"kind": "row", "step": 1, "a": None, "b": None, "c": [1.0, None], "d": True, "e": [1, 2]}


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_last_line_counts_as_not_written(cut, tmp_path):
    writer = RecordWriter(tmp_path, tiny.config())
    writer.append({"step": 5, "train_loss": 0.25})
    writer.append({"step": 10, "train_loss": 0.125})
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-cut])
    assert [row["step"] for row in read(path).rows] == [5]
    RecordWriter(tmp_path, tiny.config()).truncate_to(5)
    writer.append({"step": 10, "train_loss": 0.5})
    assert [row["train_loss"] for row in read(path).rows] == [0.25, 0.5]


def test_truncating_keeps_the_header_and_the_rows_up_to_a_step(tmp_path):
    writer = RecordWriter(tmp_path, tiny.config())
    header = read(tmp_path / NAME).header
    writer.append(*({"step": step} for step in (5, 10, 15)))
    assert [row["step"] for row in writer.truncate_to(12)] == [5, 10]
    record = read(tmp_path / NAME)
    assert [row["step"] for row in record.rows] == [5, 10] and record.header == header


def test_truncating_to_nothing_writes_a_header_of_today(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_now", lambda: "yesterday")
    writer = RecordWriter(tmp_path, tiny.config())
    writer.append({"step": 5})
    monkeypatch.setattr(records, "_now", lambda: "today")
    assert writer.truncate_to(0) == []
    record = read(tmp_path / NAME)
    assert record.header["started"] == "today" and record.rows == []


def test_an_existing_record_is_kept_by_a_new_writer(tmp_path):
    RecordWriter(tmp_path, tiny.config()).append({"step": 5})
    RecordWriter(tmp_path, tiny.config()).append({"step": 10})
    assert [row["step"] for row in read(tmp_path / NAME).rows] == [5, 10]


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x01", b"[1]\n", b'{"kind": "row", "step": 1}\n', b'{"kind": "header"}']
)
def test_what_is_no_record_is_refused_and_then_replaced(content, tmp_path):
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(UserError, match="is missing or damaged"):
        read(tmp_path / NAME)
    RecordWriter(tmp_path, tiny.config())
    assert read(tmp_path / NAME).config == tiny.config()


def test_find_lists_finished_runs_first_and_passes_over_rubbish(tmp_path):
    runs = [
        tiny.config("adam", seed=1),
        tiny.config("sgdm", seed=2),
        tiny.config("sgdm", seed=3, scale="cpu"),
        tiny.config("sgdm", seed=4, recipe="other"),
    ]
    for config in runs:
        writer = RecordWriter(config.directory(tmp_path), config)
        if config.seed != 1:
            writer.finish({})
    (tmp_path / "tiny" / NAME).write_text("rubbish")
    assert [record.config.seed for record in find(tmp_path)] == [4, 3, 2, 1]
    assert [record.config.seed for record in find(tmp_path, "tiny")] == [3, 2, 1]
    assert [record.config.seed for record in find(tmp_path, "tiny", "smoke")] == [2, 1]
    assert [record.config.seed for record in find(tmp_path, scale="cpu")] == [3]
    assert find(tmp_path / "nowhere") == []
