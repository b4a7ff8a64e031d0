"""What the report says about each recipe, before it becomes HTML."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from apo_experiments import figures
from apo_experiments.progress import counted
from apo_experiments.publication.compact import clean_command
from apo_experiments.recipe import Recipe
from apo_experiments.recipes import plan
from apo_experiments.records import Record, grouped
from apo_experiments.results import Result, findings, set_words, setting_text, summarise
from apo_experiments.runs import RunConfig
from apo_experiments.tuning import current, points_of_grids


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
        keys = list(dict.fromkeys(key for own in settings.values() for key in own))
        shared = [key for key in keys if len({own.get(key) for own in settings.values()}) == 1]
        first = next(iter(settings.values()))
        differing = [key for key in keys if key not in shared]
        return [f"{key} {first[key]}" for key in shared], differing, list(settings.items())


@dataclass(frozen=True)
class Section:
    """A recipe in the report, and its scales that have records, the largest first."""

    recipe: Recipe
    parts: list[Part]


def section(recipe: Recipe, records: Sequence[Record]) -> Section:
    """Collect the results of a recipe.

    The smoke scale only shows that a recipe runs, so it is left out if there is a larger one.

    Args:
        recipe: The recipe.
        records: All records.
    """
    own = [record for record in records if record.config.recipe == recipe.name]
    scales = [scale for scale in reversed(list(recipe.scales)) if any(r.config.scale == scale for r in own)]
    larger = [scale for scale in scales if scale != "smoke"]
    parts = [_part(recipe, scale, own) for scale in larger or scales]
    return Section(recipe, [part for part in parts if part.records])


def _part(recipe: Recipe, scale: str, own: Sequence[Record]) -> Part:
    chosen = current(recipe, scale, own)
    results = summarise(recipe, chosen)
    drawable = [record for record in chosen if record.rows]
    figure = base64.b64encode(figures.svg(figures.draw(recipe, drawable))).decode() if drawable else ""
    here = [record for record in own if record.config.scale == scale]
    grids = points_of_grids(here, chosen)
    best_of = [
        f"{label} was swept: shown is the best of {counted(points, 'point')} of the grid."
        for label, points in grids.items()
    ]
    swept = [record for record in here if record.config.label in grids and record.is_swept]
    sweeps = dict.fromkeys(shlex.join(clean_command(record.header["command"])) for record in swept)
    run = [record for record in chosen if record.config.label not in grids]
    commands = [*sweeps, *_commands(recipe, scale, run)]
    sentences = [*findings(recipe, scale, results), *best_of]
    return Part(scale, chosen, results, sentences, figure, len(here) - len(chosen), commands)


def _commands(recipe: Recipe, scale: str, records: Sequence[Record]) -> list[str]:
    """Return one command for all methods that differ from the recipe in the same way."""
    planned = {config.label: config for config in plan(recipe, scale)}
    groups = grouped(records, lambda record: tuple(_changes(planned[record.config.label], record.config)))
    commands = []
    for changes, runs in groups.items():
        labels = list(dict.fromkeys(record.config.label for record in runs))
        words = ["apo", "run", recipe.name, "--scale", scale, "--seeds", str(1 + max(r.config.seed for r in runs))]
        words += [] if len(labels) == len(recipe.entries) else ["--method", *labels]
        commands.append(shlex.join([*words, *changes]))
    return commands


def _changes(usual: RunConfig, config: RunConfig) -> list[str]:
    """Return the options that turn the recipe's current plan into this run, for settings that it still has."""
    known, own = ({**run.hyper, **run.options} for run in (usual, config))
    differing = [key for key in known if key in own and setting_text(known[key]) != setting_text(own[key])]
    length = [] if config.epochs == usual.epochs else ["--epochs", str(config.epochs)]
    return [*length, "--set", *set_words({key: own[key] for key in differing})] if differing else length
