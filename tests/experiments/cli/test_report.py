"""`apo report`: one page, whole and honest, that a browser can show without a network."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests import browser
from tests.experiments.cli import registry


class Structure(HTMLParser):
    """Collects identifiers, links and pictures, and insists on matching tags."""

    VOID = {"meta", "img", "br", "link"}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.identifiers: set[str] = set()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if "id" in named:
            self.identifiers.add(named["id"])
        if tag == "a":
            self.links.append(named["href"])
        if tag == "img":
            self.pictures.append(named["src"])
        assert tag not in ("script", "iframe", "link")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def page(apo, *words: str) -> Structure:
    done = apo("report", "--out", "report.html", *words)
    assert done.code == 0
    return Structure(Path("report.html").read_text())


def test_without_records_a_page_that_is_there_stays(apo):
    Path("report.html").write_text("a good page")
    Path("empty").mkdir()
    done = apo("report", "--runs", "empty", "--out", "report.html")
    assert done.code == 2 and "There are no records in empty: run `apo run` first" in done.err
    apo("run", "little-mlp", "--scale", "smoke")
    assert "no records of scale paper" in apo("report", "--scale", "paper", "--out", "report.html").err
    assert Path("report.html").read_text() == "a good page"


def test_recipes_without_records_appear_with_their_commands(apo, registries):
    apo("run", "little-mlp", "--scale", "smoke")
    shown = page(apo)
    assert shown.identifiers == set(registries)
    assert {link.removeprefix("#") for link in shown.links} == set(registries)
    assert shown.text.count("Not run yet. To run it") == len(registries) - 1
    assert "apo run other-task --scale cpu" in shown.text


def test_a_recipe_that_was_run_has_figure_table_settings_origin_and_command(apo, registries):
    apo("run", "little-mlp", "--scale", "smoke", "--seeds", "2")
    shown = page(apo)
    assert shown.identifiers == set(registries)
    assert len(shown.pictures) == 1 and shown.pictures[0].startswith("data:image/svg+xml;base64,")
    assert "apo run little-mlp --scale smoke --seeds 2" in shown.text
    for part in ("SGD-APO", "0.25", "All methods:", "Hardware", "Commit", "its figures say nothing"):
        assert part in shown.text
    assert "The paper claims that <APO> & co. are lower." in shown.text  # escaped, not parsed


def test_the_page_asks_for_nothing_from_elsewhere(apo):
    apo("run", "little-mlp", "--scale", "smoke")
    page(apo)
    text = re.sub(r"base64,[A-Za-z0-9+/=]+", "", Path("report.html").read_text())
    assert not re.findall(r"""(?:src|href|url|@import)\s*[=(]?\s*["']?(?:https?:)?//""", text)


def test_a_larger_scale_takes_the_place_of_smoke(apo, registries):
    registries["little-mlp"] = registry.recipe(
        "little-mlp", scales={"smoke": registry.Scale(1, 1, 0.1), "paper": registry.Scale(2, 1, 0.1)}
    )
    apo("run", "little-mlp", "--scale", "smoke")
    apo("run", "little-mlp", "--scale", "paper")
    shown = page(apo)
    assert "Scale paper" in shown.text and "Scale smoke" not in shown.text
    assert "Scale smoke" in page(apo, "--scale", "smoke").text


def test_what_falls_short_of_the_paper_is_said(apo, registries):
    scales = {"paper": registry.Scale(1, 1, 0.1)}
    entries = (registry.Entry("SGD", "sgd", paper=1e9), registry.Entry("SGD-APO", "sgd-apo", paper=-1.0))
    registries["little-mlp"] = registry.recipe("little-mlp", scales=scales, entries=entries)
    apo("run", "little-mlp", "--scale", "paper")
    shown = page(apo)
    assert "SGD-APO falls short of the paper" in shown.text and "SGD falls short" not in shown.text
    assert "in the paper: SGD-APO with -1.000" in shown.text and "Not the paper's setting" not in shown.text
    assert "† Not the paper's method: SGD-APO with the library's settings." in shown.text


def test_a_smaller_setting_is_said_and_not_compared_with_the_paper(apo, registries):
    scales = {"cpu": registry.Scale(1, 1, 0.1, {"start": "small"}), "paper": registry.Scale(4, 1, 0.1)}
    registries["little-mlp"] = registry.recipe("little-mlp", scales=scales)
    apo("run", "little-mlp", "--scale", "cpu")
    shown = page(apo).text
    assert "Not the paper's setting, whose figures stand in brackets: start small (paper: all)" in shown
    assert "(0.2500)" in shown and "; in the paper:" not in shown and "falls short" not in shown


def test_other_settings_are_counted_but_not_mixed_in(apo):
    apo("run", "little-mlp", "--scale", "smoke")
    before = page(apo).text
    apo("run", "little-mlp", "--scale", "smoke", "--set", "lr=1e-9")
    after = page(apo).text
    assert "Not shown: 2 runs with other settings" in after
    assert before.replace("\n", "") == after.replace(
        "Not shown: 2 runs with other settings (sweeps, --set).", ""
    ).replace("\n", "")


def test_settings_that_alone_were_run_are_shown(apo):
    apo("run", "little-mlp", "--scale", "smoke", "--set", "lr=0.03")
    shown = page(apo)
    assert "0.03" in shown.text and "other settings" not in shown.text


def test_the_command_that_repeats_the_runs_has_what_was_set(apo):
    apo("run", "little-mlp", "--scale", "smoke", "--method", "SGD", "--set", "lr=0.03", "start=x", "--epochs", "3")
    apo("run", "little-mlp", "--scale", "smoke", "--method", "SGD-APO")
    shown = page(apo).text
    assert "apo run little-mlp --scale smoke --seeds 1 --method SGD --epochs 3 --set lr=0.03 start=x\n" in shown
    assert "apo run little-mlp --scale smoke --seeds 1 --method SGD-APO\n" in shown


def test_a_damaged_summary_does_not_keep_the_page_from_being_written(apo):
    apo("run", "little-mlp", "--scale", "smoke")
    path = next(Path("runs").rglob("record.jsonl"))
    *lines, _ = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + '{"kind": "summary", "metrics": null, "seconds": null}\n')
    assert "little-mlp" in page(apo).text


def test_after_a_sweep_alone_its_best_point_is_shown_and_said_to_be_that(apo, monkeypatch):
    words = ["sweep", "little-mlp", "--scale", "smoke", "--grid", "lr=0.03,1e-9", "--runs", "elsewhere"]
    monkeypatch.setattr("sys.argv", ["__main__.py", *words])
    for rate in ("0.03", "1e-9"):  # the last point is the worst, since nothing moves
        apo("run", "little-mlp", "--scale", "smoke", "--method", "SGD", "--set", f"lr={rate}")
    shown = page(apo).text
    assert "SGD was swept: shown is the best of 2 points of the grid." in shown
    assert "lr 0.03" in shown and "lr 1e-09" not in shown
    assert "apo sweep little-mlp --scale smoke --grid lr=0.03,1e-9\n" in shown and "apo run little-mlp" not in shown


def test_a_run_by_hand_takes_the_place_of_the_points_of_a_sweep(apo, monkeypatch):
    with monkeypatch.context() as during_the_sweep:
        during_the_sweep.setattr("sys.argv", ["apo", "sweep", "little-mlp"])
        apo("run", "little-mlp", "--scale", "smoke", "--method", "SGD", "--set", "lr=0.03")
    apo("run", "little-mlp", "--scale", "smoke", "--method", "SGD", "--set", "lr=1e-9")
    shown = page(apo).text
    assert "was swept" not in shown and "lr 1e-09" in shown and "apo sweep" not in shown


def test_unwritable_page_is_one_sentence(apo):
    Path("folder").write_text("a file")
    done = apo("report", "--out", "folder/report.html")
    assert done.code == 2 and "Traceback" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page(apo, tmp_path, scheme):
    program = browser.browser()
    apo("run", "all", "--scale", "smoke", "--seeds", "2")
    page(apo)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    picture = tmp_path / "page.png"
    done = subprocess.run(
        [
            program,
            *options,
            *dark,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--hide-scrollbars",
            "--window-size=1100,1600",
            f"--screenshot={picture}",
            (tmp_path / "report.html").as_uri(),
        ],
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    shades = darkness(picture)
    # Text, a table and a figure leave their marks on the page's ground, light or dark.
    ground = max(set(shades), key=shades.count)
    assert ground > 200 if scheme == "light" else ground < 60
    assert 0.005 < sum(abs(shade - ground) > 60 for shade in shades) / len(shades) < 0.5


@pytest.mark.slow
def test_every_table_can_be_seen_at_every_width_and_the_contents_stand_beside_the_text(apo, registries, tmp_path):
    browser.browser()
    long = "a long name of a method that needs much of the width of a small window"
    entries = tuple(registry.Entry(f"{long} {number}", "sgd", paper=0.5) for number in range(3))
    registries["little-mlp"] = registry.recipe("little-mlp", entries=entries)
    apo("run", "all", "--scale", "smoke", "--seeds", "2")
    page(apo)
    for dark in (False, True):
        for shown in browser.measure(tmp_path, ["report.html"], tmp_path / f"profile-{dark}", dark):
            assert shown["content"] <= shown["window"] == shown["width"], shown
            assert len(shown["tables"]) > 3 and "is cut off" not in shown["tables"], shown
            assert shown["contents"] == (shown["width"] == 1400), shown
            assert shown["filter"].startswith("invert") == dark, shown


def darkness(picture: Path) -> list[int]:
    """Return the grey level of every 97th pixel."""
    from matplotlib.image import imread

    pixels = imread(picture)[..., :3].mean(axis=2).reshape(-1)[::97]
    return [round(float(shade) * 255) for shade in pixels]
