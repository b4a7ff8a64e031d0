"""The page of results: a summary and tables between comments of a page, the rows as JSON, and a figure per recipe.

The summary compares APO with the best other method, ours with the paper's values, and lists what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from apo_experiments import figures
from apo_experiments.errors import UserError
from apo_experiments.files import write_atomically
from apo_experiments.progress import counted
from apo_experiments.publication.compact import find, read_tuning
from apo_experiments.publication.rows import Section, anchor, as_json, command_block, grid, machines, rows, words
from apo_experiments.recipe import NOT_IN_PAPER, Entry, Recipe
from apo_experiments.recipes import FAMILIES, RECIPES
from apo_experiments.records import grouped
from apo_experiments.results import MARK, Result, figure_text, findings, summarise

BEGIN, END = "<!-- results:begin (made by `apo publish`) -->", "<!-- results:end -->"
#: The place for the summary, which a page may leave out.
SUMMARY_BEGIN, SUMMARY_END = "<!-- summary:begin (made by `apo publish`) -->", "<!-- summary:end -->"
#: The folder of the figures, relative to the page.
ASSETS = "assets/results"

_HEADER = ["Experiment", "Metric", "APO, ours", "APO, paper", "Best other, ours", "Best other, paper"]


def publish_page(results: Path, docs: Path) -> list[Path]:
    """Update the page, the JSON file and the figures.

    Args:
        results: The folder of all compact records.
        docs: The folder with ``results.md``.

    Returns:
        The files that were written.
    """
    found = sections(results)
    written = []
    for recipe, scale, own in found:
        drawable = [record for row in own if not row.settings for record in row.records if record.rows]
        path = docs / ASSETS / f"{recipe.name}-{scale}.png"
        if drawable:
            write_atomically(path, figures.png(figures.draw(recipe, drawable)), "--docs")
            written.append(path)
    page = docs / "results.md"
    write_atomically(page, updated(page.read_text(), found, results).encode(), "--docs")
    write_atomically(docs / "results.json", results_json(found).encode(), "--docs")
    return [*written, page, docs / "results.json"]


def sections(results: Path) -> list[Section]:
    """Return all recipes with compact records, in the recipes' order, the largest scale first."""
    records = find(results)
    pairs = {(record.config.recipe, record.config.scale) for record in records}
    return [
        (recipe, scale, rows(recipe, scale, records))
        for recipe in RECIPES.values()
        for scale in reversed(list(recipe.scales))
        if (recipe.name, scale) in pairs
    ]


def results_json(found: Sequence[Section]) -> str:
    """Return the rows of all tables, one line each."""
    lines = [json.dumps(as_json(recipe, scale, row)) for recipe, scale, own in found for row in own]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def updated(page: str, found: Sequence[Section], results: Path) -> str:
    """Return the page with new tables and, if it has a place for one, a new summary.

    Args:
        page: The text of the page.
        found: As from :func:`sections`.
        results: The folder of all compact records.
    """
    page = replaced(page, markdown(found, results))
    # The benchmark without tuning has its own page.
    own = {name: recipe for name, recipe in RECIPES.items() if name not in FAMILIES["no-tuning"]}
    return replaced(page, summary(found, own), SUMMARY_BEGIN, SUMMARY_END) if SUMMARY_BEGIN in page else page


def replaced(page: str, part: str, begin: str = BEGIN, end: str = END) -> str:
    r"""Replace the text between two comments of a page."""
    if page.count(begin) != 1 or page.count(end) != 1:
        raise UserError(f"the page has no place for the tables: add the lines {begin} and {end} where they belong.")
    before, after = page.split(begin)[0], page.split(end)[1]
    return f"{before}{begin}\n{part.strip()}\n{end}{after}"


def markdown(found: Sequence[Section], results: Path) -> str:
    """Return the tables and what belongs to them.

    Args:
        found: As from :func:`sections`.
        results: The folder of all compact records, for the tuning logs.
    """
    if not found:
        return "No records of such runs are committed yet."
    tables = grouped(found, lambda section: (section[0].paper, section[1]))
    return "\n\n".join(_table(title, scale, parts, results) for (title, scale), parts in tables.items())


def _table(title: str, scale: str, parts: Sequence[Section], results: Path) -> str:
    header = ["Experiment", "Method", "Metric", "Paper", "Ours", "Spread", "Seeds", "Epochs", "Hours"]
    body = [
        [f"`{recipe.name}`", row.name, words(recipe.metric), row.paper_text, *_figures(row)]
        for recipe, _, own in parts
        for row in own
        if not row.settings
    ]
    blocks = [f"### {title}" + ("" if scale == "paper" else f" (scale {scale})"), grid(header, body)]
    return "\n\n".join([*blocks, *(_details(*part, results) for part in parts)])


def _details(recipe: Recipe, scale: str, own: Sequence[Result], results: Path) -> str:
    """Return the details of one recipe: findings, origin, other settings, the figure, commands."""
    shown = [row for row in own if not row.settings]
    records = [record for row in shown for record in row.records]
    sentences = findings(recipe, scale, summarise(recipe, records))
    blocks = [f"#### {recipe.title}", " ".join([*sentences, f"Run on {machines(records)}."])]
    choices = []
    for row in shown:
        origin = next((one for record in row.records if (one := record.header.get("chosen_by"))), None)
        if origin:
            size = f"{counted(origin['points'], 'point')}, {counted(origin['epochs'], 'epoch')}"
            value = f"{words(origin['metric'])} {figure_text(origin['value'])}"
            choices.append(f"{row.label} {_settings(origin['hyper'])} ({size}, {value})")
    if choices:
        blocks.append("Chosen on held-out training data: " + "; ".join(choices) + ".")
    if log := read_tuning(results, recipe.name, scale):
        hours, file = sum(line["seconds"] or 0.0 for line in log) / 3600, f"results/{recipe.name}/{scale}/tuning.jsonl"
        blocks.append(f"Tuning: {counted(len(log), 'run')}, {hours:.2g} hours, all in `{file}`.")
    headers = [record.header for record in records]
    sweeps = [words for header in headers for words in (header.get("chosen_by") or {}).get("commands", [])]
    runs = [header.get("command") or [] for header in headers]
    others = [row for row in own if row.settings]
    if others:
        body = [[row.name, _settings(row.settings), *_figures(row)] for row in others]
        blocks += ["Other settings:", grid(["Method", "With", "Ours", "Spread", "Seeds", "Epochs", "Hours"], body)]
    if any(record.rows for record in records):
        blocks.append(f"![{recipe.title}: loss, {words(recipe.metric)} and rate]({ASSETS}/{recipe.name}-{scale}.png)")
    return "\n\n".join([*blocks, command_block([*sweeps, *runs])])


def _figures(row: Result) -> list[str]:
    return [figure_text(row.mean), row.deviation_text, row.seeds, str(row.epochs), f"{row.hours:.2g}"]


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(
        f"`{key}={f'{entry:g}' if isinstance(entry, float) else entry}`" for key, entry in settings.items()
    )


def summary(found: Sequence[Section], recipes: Mapping[str, Recipe]) -> str:
    """Return the summary in Markdown.

    Args:
        found: The recipes with records, each at one scale.
        recipes: All recipes, also those without records.
    """
    if not found:
        return "No records are committed yet."
    lines: list[list[str]] = []
    others: list[Recipe] = []
    ahead, reached = 0, list[bool]()
    for section in found:
        recipe, scale, _ = section
        (apo, theirs), (other, best_other) = (_best(section, ours) for ours in (True, False))
        if recipe.compute is not None or apo is None or other is None:
            others.append(recipe)
            continue
        ours, rivals = apo.mean or 0.0, other.mean or 0.0
        ahead += recipe.worse(rivals, ours)
        if theirs is not None and not apo.differs:
            reached.append(not recipe.worse(ours, theirs.paper or 0.0))
        whole = recipe.scales[scale].epochs
        lines.append(
            [
                _link(recipe) + ("" if scale == "paper" else f", {scale}"),
                words(recipe.metric),
                _value(apo, bold=recipe.worse(rivals, ours)),
                _paper(apo, theirs),
                _value(other, bold=recipe.worse(ours, rivals)),
                "-" if best_other is None else f"{best_other.label} {_paper(other, best_other)}",
                ", ".join(dict.fromkeys((apo.seeds, other.seeds))),
                str(apo.epochs) if apo.epochs == whole else f"{apo.epochs} of {whole}",
            ]
        )
    blocks = [
        f"APO ends ahead of the best other method in {ahead} of {len(lines)} experiments, and reaches the paper's "
        f"value in {sum(reached)} of the {len(reached)} that have one and the paper's setting. The better of our two "
        f"values is bold. A value of the paper in brackets belongs to another setting than ours; {MARK} marks APO with "
        "the library's settings instead of the paper's.",
        grid([*_HEADER, "Seeds", "Epochs"], lines),
    ]
    differing = [
        f"- {_link(recipe)}: {'; '.join(texts)}."
        for recipe, _, own in found
        if (texts := dict.fromkeys(row.differs for row in own if not row.settings and row.differs))
    ]
    if differing:
        blocks.append("**Not the paper's setting:**\n\n" + "\n".join(differing))
    if alone := [recipe for recipe in others if not any(line[0].startswith(_link(recipe)) for line in lines)]:
        blocks.append(f"Also measured, without such a comparison: {', '.join(map(_link, alone))}.")
    missing = [f"- {text}" for text in _missing(found, recipes)]
    if missing:
        blocks.append("**Not measured yet:**\n\n" + "\n".join(missing))
    return "\n\n".join(blocks)


def _best(section: Section, ours: bool) -> tuple[Result | None, Entry | None]:
    """Return the best row, and the entry with the paper's best value, of the methods with APO or of the others."""
    recipe, _, own = section
    rows = [row for row in own if not row.settings and row.mean is not None]
    row = recipe.best((row for row in rows if ("APO" in row.label) == ours), key=lambda row: row.mean, default=None)
    entries = [entry for entry in recipe.entries if entry.paper is not None and ("APO" in entry.label) == ours]
    return row, recipe.best(entries, key=lambda entry: entry.paper, default=None)


def _link(recipe: Recipe) -> str:
    return f"[`{recipe.name}`](#{anchor(recipe.title)})"


def _value(row: Result, bold: bool) -> str:
    value = figure_text(row.mean)
    return f"{row.name} {f'**{value}**' if bold else value} {row.deviation_text}".strip()


def _paper(row: Result, entry: Entry | None) -> str:
    """Return the paper's value of an entry, in brackets if that of the row is of another setting."""
    return "-" if entry is None else replace(row, paper=entry.paper).paper_text


def _missing(found: Sequence[Section], recipes: Mapping[str, Recipe]) -> Iterator[str]:
    """List which recipes have no records, which lack methods, and which were run at a smaller scale only."""
    measured = {recipe.name for recipe, _, _ in found}
    absent = grouped([one for one in recipes.values() if one.name not in measured], lambda recipe: recipe.paper)
    rivals = absent.pop(NOT_IN_PAPER, [])
    if absent:
        groups = (f"{paper}: {', '.join(f'`{recipe.name}`' for recipe in group)}" for paper, group in absent.items())
        yield f"{'; '.join(groups)}."
    if rivals:
        names = ", ".join(f"`{recipe.name}`" for recipe in rivals)
        # The names of these recipes do not say which methods they compare.
        labels = dict.fromkeys(entry.label for recipe in rivals for entry in recipe.entries if "APO" not in entry.label)
        yield f"Other optimizers, which the paper does not have: {', '.join(labels)} in {names}."
    partly = [
        f"{', '.join(labels)} in `{recipe.name}`"
        for recipe, _, own in found
        if (labels := [entry.label for entry in recipe.entries if all(row.label != entry.label for row in own)])
    ]
    if partly:
        yield f"Methods: {'; '.join(partly)}."
    full = {recipe.name for recipe, scale, _ in found if scale == "paper"}
    small = [f"`{recipe.name}`" for recipe, _, _ in found if recipe.name not in full and "paper" in recipe.scales]
    if small:
        yield f"The paper's scale: {', '.join(dict.fromkeys(small))}."
