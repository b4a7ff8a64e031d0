"""The page of the benchmark is made of its archived records."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.experiments.no_tuning.made_up import run
from tests.experiments.no_tuning.test_scores import cosines

from apo_experiments.cli import main
from apo_experiments.no_tuning import archive, publish
from apo_experiments.no_tuning.archive import read
from apo_experiments.no_tuning.page import BEGIN, END, markdown, rows
from apo_experiments.publication.rows import command_block, machines
from apo_experiments.records import RecordWriter
from apo_experiments.results import value


def records():
    sgdm = cosines("protein", "SGDm", [None, 0.6, 0.5, 0.7, 0.8, 0.9, 0.95])
    adamw = cosines("protein", "AdamW", [0.9, 0.8, 0.4, 0.6, 0.7, 0.8, 0.9])
    nadamw = cosines("protein", "NadamW", [0.9, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9])
    return [*sgdm, *adamw, *nadamw, run("protein", "SGDm-APO", 0.45), run("protein", "AdamW-APO", 0.46)]


def test_records_come_back_and_are_not_repeated(tmp_path):
    (path,) = archive(records(), tmp_path)
    before = path.read_text()
    assert archive(records(), tmp_path) == [path] and path.read_text() == before
    found = {record.config.label: value(record, "test_loss") for record in read(tmp_path)}
    assert len(found) == 23 and found["SGDm-APO"] == 0.45 and found["SGDm-cosine-1"] is None


def test_the_page_says_what_was_found_chosen_and_held_out():
    text = markdown(records())
    assert "1 of 21 tasks, 23 runs, 1 seed each" in text
    assert "The rate that is best for NadamW over all tasks together is that of `NadamW-cosine-0.03`." in text
    assert "| `protein` | test loss | 0.5000 at 0.1 | 0.4500 (-10.0) | 0.4000 at 0.01 | 0.4600 (10.0) |" in text
    assert "For choosing settings of the library: `protein`. Held out from that, only reported: none." in text
    assert "Without all tuned rates yet: `no-tuning-digits-mlp`" in text


def by_command(*words, commit="1234567890"):
    header = {"command": ["apo", "run", *words], "commit": commit, "hardware": {"device": "cpu"}}
    return replace(run("protein", "SGDm-APO", 0.45), header=header)


def test_figures_come_first_and_commands_last_folded():
    made = [
        replace(one, header=by_command("no-tuning", "--seeds", str(n % 5)).header) for n, one in enumerate(records())
    ]
    text = markdown(made)
    assert text.index("| Mean rank |") < text.index("regrets-cpu.png") < text.index("rates-cpu.png")
    assert text.index("rates-cpu.png") < text.index("<summary>The 5 commands of these runs</summary>")
    assert text.count("```bash") == 1 and text.index("<details>") < text.index("```bash") < text.index("</details>")


def test_commands_that_differ_in_the_task_alone_are_one():
    both = [["apo", "run", "a", "--jobs", "2"], ["apo", "run", "b", "a", "--jobs", "2"], ["apo", "run", "c"]]
    assert command_block(both) == "```bash\napo run a b --jobs 2\napo run c\n```"
    sweeps = [["apo", "sweep", "a"], ["apo", "sweep", "b"]]  # a sweep takes one recipe
    assert command_block(sweeps) == "```bash\napo sweep a\napo sweep b\n```"


def test_commits_are_one_short_list_of_a_machine():
    made = [by_command("x", commit=commit) for commit in ("aaaaaaaaaa", "bbbbbbbbbb", "aaaaaaaaaa")]
    assert machines(made) == "cpu, torch unknown, commits aaaaaaa, bbbbbbb"


def test_rows_have_every_score():
    (row,) = [row for row in rows(records()) if row["method"] == "SGDm-APO"]
    assert row["for_choosing"] and row["regret"] == -10.0 and row["train_loss"] == 0.5 and row["dead"] == 0


def test_the_page_and_its_figures_are_written(tmp_path):
    results, docs = tmp_path / "results", tmp_path / "docs"
    archive(records(), results)
    docs.mkdir()
    (docs / "no-tuning.md").write_text(f"# Above\n{BEGIN}\n{END}\nBelow.\n")
    publish(results, docs)
    page = (docs / "no-tuning.md").read_text()
    assert page.startswith("# Above") and page.endswith("Below.\n") and "SGDm-APO" in page
    assert json.loads((docs / "no-tuning.json").read_text()) == rows(records())
    assert {path.name for path in (docs / "assets/no-tuning").iterdir()} == {"regrets-cpu.png", "rates-cpu.png"}


def test_publish_archives_finished_runs(tmp_path):
    record = run("protein", "SGDm-APO", 0.45)
    writer = RecordWriter(record.config.directory(tmp_path / "runs"), record.config)
    writer.truncate_to(0)
    writer.append(*record.rows)
    writer.finish({key: entry for key, entry in record.summary.items() if key != "kind"})
    arguments = ["--runs", str(tmp_path / "runs"), "--to", str(tmp_path / "results"), "--docs", str(tmp_path / "docs")]
    assert main(["publish", "no-tuning", "--scale", "cpu", *arguments]) == 0
    assert [value(found, "test_loss") for found in read(tmp_path / "results")] == [0.45]
