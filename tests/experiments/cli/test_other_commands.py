"""`apo list`, `apo data`, `apo sweep`, `apo plot`, and what all commands share."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.experiments.cli import registry

from apo_experiments.data.registry import DATASETS, Checksum, DataFile, Dataset
from apo_experiments.sweep import Order


def test_list_names_every_recipe_with_its_place_in_the_paper_data_and_times(apo, registries):
    shown = apo("list")
    assert shown.code == 0
    for name in registries:
        (line,) = [line for line in shown.out.splitlines() if line.startswith(name)]
        for part in ("Table 7", "3 s", "2 min", "10 h", "protein (missing)", f"What {name} shows"):
            assert part in line


def test_list_tells_data_that_are_here(apo, monkeypatch, tmp_path):
    monkeypatch.setitem(DATASETS, "protein", Dataset("protein", "", "tables", (DataFile("a.csv", 3),), (), "", ""))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("1,2")
    assert "protein (here)" in apo("list").out
    assert "protein (missing)" in apo("list", "--data-dir", "elsewhere").out


def test_data_list_tells_damaged_files_from_missing_ones_and_from_sound_ones(apo, monkeypatch, tmp_path):
    official = DataFile("a.csv", 3, Checksum("900150983cd24fb0d6963f7d28e17f72", "md5"))
    monkeypatch.setitem(DATASETS, "protein", Dataset("protein", "", "tables", (official,), (), "", ""))
    (tmp_path / "data").mkdir()
    assert "protein  missing" in apo("data", "list", "protein").out
    for content, word in ((b"abc", "here"), (b"ab", "damaged"), (b"abd", "damaged")):
        (tmp_path / "data" / "a.csv").write_bytes(content)
        shown = apo("data", "list", "protein").out
        assert f"protein  {word}" in shown and ("apo data verify" in shown) == (word == "damaged")


def test_list_of_one_recipe_has_methods_grids_and_keys_for_set(apo):
    shown = apo("list", "little-mlp").out
    for part in (
        "SGD: sgd  lr=0.2",
        "grid: lr in [0.1, 0.2]",
        "SGD-APO †: sgd-apo",
        "--set takes epochs",
        "data, fail",
    ):
        assert part in shown


def test_list_of_one_recipe_says_which_scales_and_methods_are_not_the_papers(apo):
    lines = apo("list", "little-mlp").out.splitlines()
    notes = {line.split()[0]: below for line, below in itertools.pairwise(lines) if line.startswith("  ")}
    assert "not the paper's setting: data generated (paper: official), 2 epochs (paper: 4)" in notes["smoke"]
    assert "not the paper's setting: 3 epochs (paper: 4)" in notes["cpu"] and "setting" not in notes["paper"]
    assert any("† not the paper's method" in line for line in lines)


def test_list_of_an_unknown_recipe_is_a_user_error(apo):
    assert apo("list", "litle-mlp").code == 2


def test_help_and_errors_of_usage_need_no_heavy_imports():
    # torch takes seconds: a user who asks for help should not wait for it.
    program = (
        "import sys\n"
        "from apo_experiments.cli import main\n"
        "try:\n    main(['run', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'rich', 'optuna'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(Path(registry.__file__).parents[3] / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_module_and_version(capfd):
    source = str(Path(registry.__file__).parents[3] / "src")
    done = subprocess.run(
        [sys.executable, "-m", "apo_experiments", "--version"],
        env={"PYTHONPATH": source},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stdout.startswith(b"apo 0.")


def test_verify_tells_sound_damaged_and_absent_data_apart(apo, monkeypatch, tmp_path):
    for name, size in (("protein", 3), ("parkinsons", 4), ("slice", 5)):
        files = (DataFile(f"{name}.csv", size),)
        monkeypatch.setitem(DATASETS, name, Dataset(name, "", "tables", files, (), "", "put it there"))
    monkeypatch.setattr("apo_experiments.data.tables.load", lambda name, root: None)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "protein.csv").write_text("1,2")
    sound = apo("data", "verify")
    assert sound.code == 0 and sound.out == "protein: sound\n"
    (tmp_path / "data" / "parkinsons.csv").write_text("1,2")
    damaged = apo("data", "verify")
    assert damaged.code == 1 and "parkinsons.csv is truncated" in damaged.out and "slice" not in damaged.out
    assert apo("data", "verify", "slice").code == 1


def test_fetch_needs_names_and_knows_them(apo):
    assert "apo data list" in apo("data", "fetch").err
    unknown = apo("data", "fetch", "protien")
    assert unknown.code == 2 and "did you mean protein" in unknown.err


def test_fetch_hands_the_folder_over_and_fails_in_one_sentence(apo):
    done = apo("data", "fetch", "iwslt14", "--data-dir", "elsewhere")
    assert done.code == 2 and done.err.startswith("apo: The data set iwslt14 cannot be downloaded")
    assert "elsewhere" in done.err


def test_verify_of_real_formats_runs_the_loader(apo, tmp_path):
    folder = tmp_path / "data" / "fashion-mnist"
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"not idx"))
    done = apo("data", "verify")
    assert done.code == 1 and "fashion-mnist" in done.out and "missing" in done.out


@pytest.fixture
def sweeps(monkeypatch):
    """Stands in for what carries out sweeps."""
    calls = []

    def run(order, jobs, *listeners):
        calls.append((order, jobs))
        return [
            {"recipe": "little-mlp", "method": "SGD", "hyper": {"lr": 0.1, "betas": (0.9, 0.99)}, "value": 0.123456},
            {"recipe": "little-mlp", "method": "SGD", "hyper": {"lr": 1.0, "betas": (0.9, 0.99)}, "value": None},
        ]

    monkeypatch.setattr("apo_experiments.sweep.run", run)
    return calls


def test_sweep_hands_its_options_over_and_prints_the_table(apo, sweeps):
    counts = ("--trials", "3", "--seeds", "2", "--jobs", "4")
    done = apo("sweep", "little-mlp", "--method", "SGD", *counts, "--set", "epochs=5", "--json", "table.json")
    assert done.code == 0
    ((order, jobs),) = sweeps
    assert jobs == 4 and order == Order(
        "little-mlp", Path("runs"), ["SGD"], "cpu", trials=3, seeds=2, overrides={"epochs": "5"}
    )
    assert "lr=0.1 betas=(0.9, 0.99)  0.1235" in done.out
    assert "apo run little-mlp --scale cpu --method SGD --set lr=0.1 betas=0.9,0.99 epochs=5\n" in done.out
    assert json.loads(Path("table.json").read_text())[0]["hyper"]["lr"] == 0.1


def test_the_commands_that_a_sweep_suggests_run_what_was_swept(apo, sweeps):
    where = ("--runs", "a folder", "--data-dir", "there")
    done = apo("sweep", "little-mlp", "--epochs", "7", "--set", "data=generated", *where)
    ending = "--epochs 7 --runs 'a folder' --data-dir there"
    assert f"  apo run little-mlp --scale cpu --method SGD --set data=generated {ending} --best\n" in done.out
    assert f"--method SGD --set lr=0.1 betas=0.9,0.99 data=generated {ending}\n" in done.out


def test_a_point_that_failed_costs_exit_code_1(apo, sweeps, monkeypatch):
    row = {"recipe": "little-mlp", "method": "SGD", "hyper": {"lr": 0.1}, "value": None, "outcome": "failed"}
    monkeypatch.setattr("apo_experiments.sweep.run", lambda *arguments: [row])
    done = apo("sweep", "little-mlp")
    assert done.code == 1 and "To run the best points" not in done.out


def test_sweep_takes_one_recipe(apo, sweeps):
    assert apo("sweep", "all").code == 2
    assert not sweeps


def test_plot_draws_every_scale_that_has_records(apo):
    apo("run", "all", "--scale", "smoke")
    done = apo("plot", "--out", "drawn")
    assert done.code == 0
    names = {f"{name}-smoke.{kind}" for name in ("little-mlp", "other-task") for kind in ("png", "pdf")}
    assert {path.name for path in Path("drawn").iterdir()} == names
    assert set(done.out.split()) == {f"drawn/{name}" for name in names}
    assert (Path("drawn") / "little-mlp-smoke.png").read_bytes().startswith(b"\x89PNG")
    assert (Path("drawn") / "little-mlp-smoke.pdf").read_bytes().startswith(b"%PDF")


def test_plot_without_records_says_what_to_run(apo):
    done = apo("plot", "little-mlp")
    assert done.code == 2 and "apo run little-mlp" in done.err
    assert not Path("figures").exists()


def test_plot_of_a_run_without_a_curve_says_so(apo):
    apo("run", "little-mlp", "--scale", "smoke", "--method", "SGD", "--set", "lr=1e30")
    done = apo("plot", "little-mlp")
    assert done.code == 2 and "runs of little-mlp in runs have no curve: they diverged" in done.err


def test_plot_of_an_unknown_figure_is_one_sentence(apo):
    apo("run", "little-mlp", "--scale", "smoke", "--method", "SGD")
    done = apo("plot", "--figure", "pie")
    assert done.code == 2 and "choose one of curves" in done.err


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("plot", "--out", "file"), "--out"),
        (("plot", "--out", "file/folder"), "--out"),
        (("publish", "--scale", "cpu", "--to", "file"), "--to"),
        (("sweep", "little-mlp", "--scale", "smoke", "--storage", "sqlite:///file/x.db"), "--storage"),
        (("sweep", "little-mlp", "--scale", "smoke", "--storage", "x.db"), "--storage"),
        (("run", "little-mlp", "--scale", "smoke", "--runs", "file"), "--runs"),
    ],
)
def test_what_cannot_be_written_names_the_option_that_says_where(apo, words, option):
    Path("file").touch()
    assert apo("run", "little-mlp", "--scale", "cpu", "--set", "data=generated", "--method", "SGD").code == 0
    done = apo(*words)
    assert done.code == 2 and option in done.err and done.err.count("\n") == 1
    assert {other for other in ("--out", "--to", "--storage", "--runs", "--docs") if other in done.err} <= {
        option,
        *(["--runs"] if option == "--storage" else []),
    }


def test_report_says_that_it_is_at_work(apo):
    apo("run", "little-mlp", "--scale", "smoke")
    assert "Reading the records in runs and drawing their figures" in apo("report").err
