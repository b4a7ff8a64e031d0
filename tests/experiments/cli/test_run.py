"""`apo run`, end to end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from tests.experiments.cli import registry

from apo_experiments import records
from apo_experiments.recipe import Entry


def one_sentence(text: str) -> bool:
    return text.startswith("apo: ") and text.count("\n") == 1 and "Traceback" not in text


def test_every_planned_run_is_carried_out_once_and_compared_with_the_paper(apo):
    done = apo("run", "little-mlp", "--scale", "smoke", "--seeds", "2")
    assert done.code == 0
    found = records.find(Path("runs"))
    assert sorted((r.config.label, r.config.seed) for r in found) == [
        (label, seed) for label in ("SGD", "SGD-APO") for seed in (0, 1)
    ]
    assert "little-mlp (Table 7), scale smoke: test_loss, less is better (* the best)" in done.out
    table = done.out.split("\n")
    # The paper's best, in brackets because this scale is not its setting.
    assert any(line.startswith("SGD-APO †") and line.endswith("(0.2500)*") for line in table)
    values = [r.summary["metrics"]["test_loss"] for r in found if r.config.label == "SGD"]
    assert any(line.startswith("SGD ") and f"{sum(values) / 2:#.4g}" in line for line in table)


def test_json_summary_has_one_entry_a_run(apo):
    assert apo("run", "little-mlp", "--scale", "smoke", "--json", "out/summary.json").code == 0
    summary = json.loads(Path("out/summary.json").read_text())
    by_method = {record.config.label: record for record in records.find(Path("runs"))}
    assert summary == [
        {
            "recipe": "little-mlp",
            "method": label,
            "seed": 0,
            "metric": "test_loss",
            "value": by_method[label].summary["metrics"]["test_loss"],
            "paper": paper,
        }
        for label, paper in (("SGD", 0.5), ("SGD-APO", 0.25))
    ]


@pytest.mark.parametrize("command", [("run", "little-mlp", "--json"), ("sweep", "little-mlp", "--json")])
def test_a_summary_that_could_not_be_written_is_refused_before_anything_runs(apo, command):
    Path("folder").mkdir()
    Path("file").touch()
    done = apo(*command, "folder", "--scale", "smoke")
    assert done.code == 2 and one_sentence(done.err) and "--json was given folder, which is a folder" in done.err
    done = apo(*command, "file/summary.json", "--scale", "smoke")
    assert done.code == 2 and one_sentence(done.err) and "name another file" in done.err
    assert not Path("runs").exists()


def test_the_same_command_does_not_repeat_what_is_finished(apo):
    words = ("run", "little-mlp", "--scale", "smoke")
    first, again = apo(*words), apo(*words)
    assert "started" in first.err and "finished before" not in first.err
    assert "started" not in again.err and again.err.count("finished before") == 2
    assert first.out == again.out


def test_a_compiled_run_says_so_and_is_the_same_run(apo, monkeypatch):
    compiled = []
    monkeypatch.setattr("apo_experiments.training.CompiledNetwork", lambda network: compiled.append(network) or network)
    assert apo("run", "little-mlp", "--scale", "smoke", "--method", "SGD", "--compile").code == 0
    (record,) = records.find(Path("runs"))
    assert record.config.compiled and len(compiled) == 1
    assert apo("run", "little-mlp", "--scale", "smoke", "--method", "SGD").code == 0
    assert len(records.find(Path("runs"))) == 1, "the run is finished, compiled or not"


def test_method_seeds_and_set_choose_the_runs(apo):
    done = apo(
        "run", "little-mlp", "--scale", "smoke", "--method", "SGD", "--seeds", "1", "--set", "lr=0.05", "epochs=3"
    )
    (record,) = records.find(Path("runs"))
    assert done.code == 0
    assert (record.config.label, record.config.hyper["lr"], record.config.epochs) == ("SGD", 0.05, 3)
    assert "SGD-APO" not in done.out


def test_where_methods_were_left_out_nobody_is_in_front_of_them(apo, registries):
    entries = (*registry.recipe("x").entries, Entry("Other", "sgd", {"lr": 0.3}, paper=0.4))
    registries["little-mlp"] = registry.recipe("little-mlp", entries=entries, scales={"cpu": registry.Scale(1, 1, 0.1)})
    assert "In front" not in apo("run", "little-mlp", "--method", "SGD").out
    two = apo("run", "little-mlp", "--method", "SGD", "Other").out
    assert "In front here: " in two and "in the paper" not in two
    assert "; in the paper: SGD-APO with 0.2500." in apo("run", "little-mlp").out


def test_all_runs_every_recipe(apo, registries):
    assert apo("run", "all", "--scale", "smoke").code == 0
    assert {record.config.recipe for record in records.find(Path("runs"))} == set(registries)


def test_runs_go_where_the_option_or_the_variable_says(apo, monkeypatch):
    monkeypatch.setenv("APO_RUNS", "from-variable")
    apo("run", "little-mlp", "--scale", "smoke", "--method", "SGD")
    apo("run", "little-mlp", "--scale", "smoke", "--method", "SGD", "--runs", "from-option")
    assert len(records.find(Path("from-variable"))) == len(records.find(Path("from-option"))) == 1


def test_an_unknown_recipe_is_one_sentence_with_the_one_that_was_meant(apo):
    done = apo("run", "little_mlp")
    assert done.code == 2 and one_sentence(done.err)
    assert "did you mean little-mlp?" in done.err


def test_a_wrong_set_key_is_one_sentence_before_anything_runs(apo):
    done = apo("run", "little-mlp", "--scale", "smoke", "--set", "learning_rate=1")
    assert done.code == 2 and one_sentence(done.err) and "learning_rate" in done.err
    assert not Path("runs").exists()


def test_set_without_a_value_is_one_sentence(apo):
    done = apo("run", "little-mlp", "--set", "lr")
    assert done.code == 2 and one_sentence(done.err) and "key=value" in done.err


def test_missing_data_is_one_sentence_that_says_how_to_get_it(apo):
    done = apo("run", "little-mlp", "--scale", "cpu")
    assert done.code == 2 and "apo data fetch protein" in done.err and "Traceback" not in done.err
    assert not Path("runs").exists()


def test_one_recipe_without_data_does_not_keep_the_others_from_running(apo, registries):
    registries["without-data"] = registry.recipe("without-data", scales={"smoke": registry.Scale(1, 1, 0.1)})
    registries["little-mlp"] = registry.recipe(
        "little-mlp", scales={"smoke": registry.Scale(1, 1, 0.1, {"data": "official"})}
    )
    done = apo("run", "little-mlp", "without-data", "--scale", "smoke")
    assert done.code == 2 and "little-mlp: The data set protein" in done.err
    assert {record.config.recipe for record in records.find(Path("runs"))} == {"without-data"}


def test_a_run_that_breaks_costs_exit_code_1_and_shows_its_traceback_only_when_asked(apo):
    quiet = apo("run", "little-mlp", "--scale", "smoke", "--set", "fail=yes", "--json", "summary.json")
    assert quiet.code == 1 and "failed with RuntimeError: the task is broken" in quiet.err
    assert "Traceback" not in quiet.err and "--debug" in quiet.err
    assert [entry["value"] for entry in json.loads(Path("summary.json").read_text())] == [None, None]
    for words in (("run", "little-mlp", "--debug"), ("--debug", "run", "little-mlp")):
        assert "Traceback" in apo(*words, "--scale", "smoke", "--set", "fail=yes").err


def test_a_value_that_nothing_can_be_built_with_costs_exit_code_2_and_one_sentence(apo, monkeypatch):
    def refuse(problem, hyper):
        raise ValueError("Invalid learning rate.\nIt is too small.")

    monkeypatch.setattr(registry, "Descent", refuse)
    words = ("run", "little-mlp", "--scale", "smoke", "--set", "lr=-1")
    done = apo(*words)
    assert done.code == 2 and one_sentence(done.err) and "(ValueError: Invalid learning rate. It is" in done.err
    assert "in refuse" in apo(*words, "--debug").err
    assert not Path("runs").exists()


def test_a_run_that_diverges_costs_exit_code_1_and_has_no_value(apo):
    done = apo("run", "little-mlp", "--scale", "smoke", "--set", "lr=1e30", "--method", "SGD", "--json", "summary.json")
    assert done.code == 1
    assert "Runs that diverged: SGD (1)." in done.out
    assert json.loads(Path("summary.json").read_text())[0]["value"] is None


def test_interruption_leaves_a_run_that_the_printed_command_continues(apo, monkeypatch):
    whole = apo("run", "little-mlp", "--scale", "smoke", "--runs", "whole")
    steps, step = [0], registry.Descent.step

    def interrupted_step(self, inputs, target):
        steps[0] += 1
        if steps[0] == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, inputs, target)

    monkeypatch.setattr(registry.Descent, "step", interrupted_step)
    words = ("run", "little-mlp", "--scale", "smoke", "--runs", "a folder")
    stopped = apo(*words)
    assert stopped.code == 130
    assert "Continue with: apo run little-mlp --scale smoke --runs 'a folder'" in stopped.err
    resumed = apo(*words)
    assert resumed.code == 0 and "resuming from step 4" in resumed.err
    assert resumed.out == whole.out


def test_an_unexpected_error_outside_a_run_is_one_sentence(apo, monkeypatch):
    monkeypatch.setattr("apo_experiments.commands.options.recipes", lambda names: 1 / 0)
    done = apo("run", "little-mlp")
    assert done.code == 1 and one_sentence(done.err) and "--debug" in done.err


@pytest.mark.parametrize(
    "words", [(), ("run",), ("run", "little-mlp", "--scale", "huge"), ("fly",), ("run", "x", "--seeds", "0")]
)
def test_wrong_usage_is_exit_code_2_and_one_sentence(apo, words):
    done = apo(*words)
    assert done.code == 2 and done.err.count("\n") == 1 and "--help` has examples." in done.err


@pytest.mark.parametrize("command", ["list", "run", "sweep", "plot", "report", "publish", "data"])
def test_help_has_examples(apo, command):
    shown = apo(command, "--help")
    assert shown.code == 0 and f"examples:\n  apo {command}" in shown.out


def test_the_device_is_not_part_of_a_result(apo, registries):
    registries["little-mlp"] = registry.recipe("little-mlp", entries=(Entry("SGD", "sgd"),))
    assert apo("run", "little-mlp", "--scale", "smoke", "--device", "cpu").code == 0
    assert records.find(Path("runs"))[0].config.device == "cpu"
