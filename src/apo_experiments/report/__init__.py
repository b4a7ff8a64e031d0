"""The report: one self-contained HTML page with every recipe, its figure, its table and how to repeat it.

``page.html`` is its template. Nothing on it comes from elsewhere: no script, no font and no picture.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import jinja2

from apo_experiments import figures
from apo_experiments.errors import UserError
from apo_experiments.figures.curves import axis_name
from apo_experiments.files import write_atomically
from apo_experiments.progress import counted, duration
from apo_experiments.publication.compact import clean_command
from apo_experiments.recipe import NOT_IN_PAPER, Recipe
from apo_experiments.recipes import RECIPES, plan
from apo_experiments.records import Record, by_label, find, grouped
from apo_experiments.results import MARK, Result, figure_text, findings, leader, set_words, setting_text, summarise
from apo_experiments.tuning import current, points, varied


def write(path: Path, root: Path, scale: str | None = None) -> int:
    """Write the page from the records alone.

    Args:
        path: The file.
        root: The folder of all runs.
        scale: Only runs of this scale.

    Returns:
        How many recipes have results.

    Raises:
        UserError: There are no records (a page that is there stays as it is), or the file cannot be written.
    """
    records = find(root, scale=scale)
    parts = {recipe.name: _parts(recipe, records) for recipe in RECIPES.values()}
    run = sum(map(bool, parts.values()))
    if not run:
        size = f" of scale {scale}" if scale else ""
        raise UserError(f"There are no records{size} in {root}: run `apo run` first, or name their folder with --runs.")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.globals |= {"MARK": MARK, "NOT_IN_PAPER": NOT_IN_PAPER, "axis_name": axis_name, "counted": counted}
    environment.globals |= {"duration": duration, "figure_text": figure_text, "leader": leader}
    page = environment.get_template("page.html").render(
        sections=[{"recipe": recipe, "parts": parts[recipe.name]} for recipe in RECIPES.values()],
        methods={(recipe.name, entry.label): entry.method for recipe in RECIPES.values() for entry in recipe.entries},
        today=datetime.now(timezone.utc).strftime("%d %B %Y").lstrip("0"),
    )
    write_atomically(path, page.encode(), "--out")
    return run


@dataclass(frozen=True)
class Part:
    """A recipe at one scale.

    Attributes:
        scale: The scale.
        records: Its runs.
        results: One for each entry.
        findings: Sentences on which method is best and what falls short.
        figure: The figure as SVG in base64, or nothing if there is nothing to draw.
        others: How many runs with other settings (sweeps, ``--set``) are left out.
        commands: What repeats these runs.
    """

    scale: str
    records: list[Record]
    results: list[Result]
    findings: list[str]
    figure: str
    others: int
    commands: list[str]

    @property
    def seconds(self) -> float:
        """Training time of all runs."""
        return sum(record.seconds for record in self.records)

    def origins(self) -> list[tuple[str, str]]:
        """Return the distinct facts on where the runs come from, as pairs of a name and a text."""
        headers = [record.header for record in self.records]
        facts = [("Command", shlex.join(map(str, header.get("command") or []))) for header in headers]
        facts += [("Commit", str(header.get("commit") or "unknown")) for header in headers]
        for name in ("hardware", "versions"):
            found = [header[name] for header in headers if isinstance(header.get(name), dict)]
            facts += [(name.capitalize(), ", ".join(f"{key} {value}" for key, value in one.items())) for one in found]
        return [pair for pair in dict.fromkeys(facts) if pair[1]]

    def settings(self) -> tuple[list[str], list[str], list[tuple[str, dict[str, str]]]]:
        """Return the settings that all methods share, the keys of the others, and all settings of each method."""
        configs = {record.config.label: record.config for record in self.records}
        settings = {
            label: {key: setting_text(value) for key, value in {"epochs": c.epochs, **c.hyper, **c.options}.items()}
            for label, c in configs.items()
        }
        differing = varied(list(settings.values()))
        first = next(iter(settings.values()))
        shared = [f"{key} {text}" for key, text in first.items() if key not in differing]
        return shared, differing, list(settings.items())


def _parts(recipe: Recipe, records: Sequence[Record]) -> list[Part]:
    """Return the scales of a recipe that have records, the largest first.

    The smoke scale only shows that a recipe runs, so it is left out if there is a larger one.
    """
    own = [record for record in records if record.config.recipe == recipe.name]
    scales = [scale for scale in reversed(list(recipe.scales)) if any(r.config.scale == scale for r in own)]
    larger = [scale for scale in scales if scale != "smoke"]
    return [part for scale in larger or scales if (part := _part(recipe, scale, own)).records]


def _part(recipe: Recipe, scale: str, own: Sequence[Record]) -> Part:
    chosen = current(recipe, scale, own)
    results = summarise(recipe, chosen)
    drawable = [record for record in chosen if record.rows]
    figure = base64.b64encode(figures.rendered(figures.draw(recipe, drawable), "svg")).decode() if drawable else ""
    here = [record for record in own if record.config.scale == scale]
    labels = dict.fromkeys(record.config.label for record in chosen if record.is_swept)
    swept = [record for record in here if record.config.label in labels and record.is_swept]
    tried = {label: len(points(by_label(swept)[label])) for label in labels}
    best_of = [
        f"{label} was swept: shown is the best of {counted(number, 'point')} of the grid."
        for label, number in tried.items()
    ]
    sweeps = dict.fromkeys(shlex.join(clean_command(record.header["command"])) for record in swept)
    run = [record for record in chosen if record.config.label not in labels]
    commands = [*sweeps, *_commands(recipe, scale, run)]
    sentences = [*findings(recipe, scale, results), *best_of]
    return Part(scale, chosen, results, sentences, figure, len(here) - len(chosen), commands)


def _commands(recipe: Recipe, scale: str, records: Sequence[Record]) -> list[str]:
    """Return one command for all methods that differ from the recipe in the same way."""
    planned = {config.label: config for config in plan(recipe, scale)}

    def changes_of(record: Record) -> tuple[str, ...]:
        """Return the options that turn the recipe's current plan into a run, for settings that it still has."""
        usual, config = planned[record.config.label], record.config
        known, own = ({**run.hyper, **run.options} for run in (usual, config))
        differing = [key for key in known if key in own and setting_text(known[key]) != setting_text(own[key])]
        length = [] if config.epochs == usual.epochs else ["--epochs", str(config.epochs)]
        return (*length, "--set", *set_words({key: own[key] for key in differing})) if differing else tuple(length)

    groups = grouped(records, changes_of)
    commands = []
    for changes, runs in groups.items():
        labels = list(dict.fromkeys(record.config.label for record in runs))
        words = ["apo", "run", recipe.name, "--scale", scale, "--seeds", str(1 + max(r.config.seed for r in runs))]
        words += [] if len(labels) == len(recipe.entries) else ["--method", *labels]
        commands.append(shlex.join([*words, *changes]))
    return commands
