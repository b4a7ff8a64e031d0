"""Settings with new names: commands, records and studies with the former ones mean what they meant."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from apo_experiments import records, tuning
from apo_experiments.cli import main
from apo_experiments.errors import UserError
from apo_experiments.publication import compact
from apo_experiments.publication.compact import path_of
from apo_experiments.publication.rows import rows
from apo_experiments.recipes import RECIPES, plan
from apo_experiments.records import NAME, Record
from apo_experiments.renamed import as_first_named, in_words_of_today, of_today
from apo_experiments.results import variant
from apo_experiments.runs import RunConfig
from apo_experiments.sweep.grid import Order, searches

RESULTS = Path(__file__).parents[3] / "results"
MLP = RECIPES["mnist-mlp"]


def written_before(config: RunConfig) -> dict:
    """Return what a record from before the change says of a run."""
    return json.loads(json.dumps({**asdict(config), "hyper": as_first_named(config.hyper)}))


def final(config: RunConfig, figure: float, **header: object) -> Record:
    return Record(config, header, [], {"kind": "summary", "metrics": {MLP.metric: figure}, "seconds": 1.0})


def share(text: str) -> dict[str, str]:
    return {"other_batch_share": text}


@pytest.mark.parametrize("name", RECIPES)
def test_a_record_from_before_is_the_run_that_is_planned_today(name):
    for scale in RECIPES[name].scales:
        for config in plan(RECIPES[name], scale, seeds=1):
            before = written_before(config)
            assert not {"sigma", "over_relaxation"} <= before["hyper"].keys() and "total_steps" not in before["hyper"]
            read = RunConfig.from_record(before)
            assert (read.identity(), variant(read)) == (config.identity(), variant(config))


@pytest.mark.parametrize("text", ["rising", "none", "0.5"])
def test_committed_records_are_those_of_todays_plans(text):
    settings, _, _ = in_words_of_today(share(text), {})
    made = {path_of(config, RESULTS).exists() for config in plan(MLP, "cpu", ["SGDm-APO"], 3, settings)}
    assert made == {text != "0.5"}  # which nobody has run


def test_both_names_together_were_never_one_setting():
    both = {"other_batch_share": 0.5, "total_steps": "auto", "over_relaxation": 1.0}
    assert as_first_named(both) == {"other_batch_share": 0.5, "total_steps": "auto", "sigma": 1.0}
    assert of_today(as_first_named(both)) == both


@pytest.mark.parametrize(
    ("given", "read", "sentence"),
    [
        ({"sigma": "2"}, {"over_relaxation": "2"}, "write --set over_relaxation=2."),
        (share("rising"), {**share("none"), "total_steps": "auto"}, "write --set total_steps=auto."),
        (share("none"), {**share("none"), "total_steps": "none"}, "write --set total_steps=none,"),
        (share("0.5"), {**share("0.5"), "total_steps": "none"}, "write --set total_steps=none,"),
    ],
)
def test_a_former_name_is_read_and_one_sentence_says_so(given, read, sentence):
    words, _, sentences = in_words_of_today({"lr": "0.1", **given}, {})
    assert words == {"lr": "0.1", **read} and len(sentences) == 1 and sentence in sentences[0]
    assert in_words_of_today(words, {}) == (words, {}, [])


def test_names_of_today_are_left_alone():
    words = {"over_relaxation": "2", "total_steps": "auto", **share("0.5")}
    assert in_words_of_today(words, {"lr": "0.1,0.3"}) == (words, {"lr": "0.1,0.3"}, [])


@pytest.mark.parametrize(
    ("grid", "words", "axes"),
    [
        ({"sigma": "1,2"}, {}, {"over_relaxation": "1,2"}),
        (share("rising,none"), {}, {"total_steps": "auto,none"}),
        (share("none,0.5"), {"total_steps": "none"}, share("none,0.5")),
    ],
)
def test_axes_of_a_grid_are_read_under_their_former_names(grid, words, axes):
    assert in_words_of_today({}, grid)[:2] == (words, axes)


def test_what_has_no_name_of_today_is_refused():
    with pytest.raises(UserError, match="sigma is over_relaxation now, and both were given: leave sigma out"):
        in_words_of_today({"sigma": "2", "over_relaxation": "1"}, {})
    with pytest.raises(UserError, match=r"one axis cannot have rising and 0\.5: give two commands"):
        in_words_of_today({}, share("rising,0.5"))


@pytest.mark.parametrize(
    ("grid", "digest"),
    [
        ({"total_steps": ["auto", "none"]}, "8eabf338a7"),  # was other_batch_share=rising,none
        ({"over_relaxation": ["1", "2"]}, "830408311e"),  # was sigma=1,2
    ],
)
def test_studies_from_before_are_found(grid, digest):
    (search,) = searches(MLP, Order(MLP.name, Path(), ["SGDm-APO"], "smoke", grid=grid))
    assert search.name == f"mnist-mlp/smoke/SGDm-APO/{digest}"


def test_seeds_from_before_and_after_make_one_row(tmp_path):
    first, second = plan(MLP, "cpu", ["SGDm-APO"], 2)
    path = compact.write(final(first, 1.0), tmp_path)
    text = path.read_text().replace(json.dumps(asdict(first)), json.dumps(written_before(first)))
    assert '"rising"' in text and "total_steps" not in text
    path.write_text(text)
    old = compact.read(path)
    assert compact.write(old, tmp_path) == path
    (row,) = rows(MLP, "cpu", [old, final(second, 3.0)])
    assert (row.settings, row.values) == ({}, (1.0, 3.0))


def test_best_finds_trials_from_before(tmp_path):
    for former, figure in (("rising", 2.0), (None, 1.0)):
        words = {"total_steps": "none" if former is None else "auto", "over_relaxation": "2"}
        (config,) = plan(MLP, "cpu", ["SGDm-APO"], 1, words)
        header = {"kind": "header", "config": written_before(config), "command": ["apo", "sweep", "mnist-mlp"]}
        assert header["config"]["hyper"]["other_batch_share"] == former
        folder = config.directory(tmp_path)
        folder.mkdir(parents=True)
        lines = [header, {"kind": "summary", "metrics": {MLP.metric: figure}}]
        (folder / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    hyper, origin = tuning.choose(MLP, "SGDm-APO", "cpu", records.find(tmp_path), config.options)
    assert origin["hyper"] == {"total_steps": None} and origin["points"] == 2
    (best,) = plan(MLP, "cpu", ["SGDm-APO"], 1, hyper)
    assert best.hyper["total_steps"] is None and best.hyper["over_relaxation"] == 2


@pytest.mark.slow
def test_both_names_are_one_run_on_the_command_line(tmp_path, capfd):
    command = ["run", "mnist-mlp", "--scale", "smoke", "--method", "SGDm-APO", "--runs", str(tmp_path), "--set"]
    assert main([*command, "sigma=2", "other_batch_share=none"]) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("apo: ")]
    assert len(said) == 2 and "sigma is over_relaxation now" in said[0] and "total_steps=none" in said[1]
    (path,) = tmp_path.rglob(NAME)
    before = path.read_bytes()
    assert main([*command, "over_relaxation=2", "total_steps=none"]) == 0
    assert "apo: " not in capfd.readouterr().err
    assert list(tmp_path.rglob(NAME)) == [path] and path.read_bytes() == before
    (record,) = records.find(tmp_path)
    assert (record.config.hyper["over_relaxation"], record.config.hyper["total_steps"]) == (2, None)
