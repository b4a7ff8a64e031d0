"""``docs/no-tuning.md``: tables and figures of the benchmark, all from its committed records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, isnan
from pathlib import Path
from typing import Any

import pandas
from matplotlib.figure import Figure

from apo_experiments.figures import png
from apo_experiments.figures.curves import draw_band
from apo_experiments.figures.style import COLOURS, applied, legend_below
from apo_experiments.figures.style import grid as panels_of
from apo_experiments.files import write_atomically
from apo_experiments.no_tuning.archive import read
from apo_experiments.no_tuning.scores import NEAR, TUNED, Runs, Table, scores, standings, task_runs
from apo_experiments.publication.compact import rounded
from apo_experiments.publication.page import replaced
from apo_experiments.publication.rows import command_block, grid, machines
from apo_experiments.recipe import SCALES, Recipe
from apo_experiments.recipes.no_tuning import CHOOSING, FAMILY, RECIPES
from apo_experiments.records import Record
from apo_experiments.results import figure_text

NAME = "no-tuning.md"
BEGIN, END = "<!-- no-tuning:begin (made by `apo publish`) -->", "<!-- no-tuning:end -->"
#: The folder of the figures, relative to the page.
ASSETS = "assets/no-tuning"

#: Recipe and runs of each task.
Tasks = Mapping[str, tuple[Recipe, Runs]]

#: Methods whose values, not only regrets, are shown for every task.
_SHOWN = ("SGDm tuned", "SGDm-APO", "AdamW tuned", "AdamW-APO", "Muon-APO", "NadamW calibrated")

#: The lines of a panel of rates: a learned rate, and the tuned cosine of the same optimizer.
_PAIRS = {"SGDm": ("SGDm-APO", "SGDm tuned"), "AdamW": ("AdamW-APO", "AdamW tuned")}
_COLUMNS = 4


def publish(results: Path, docs: Path) -> list[Path]:
    """Update the page, its JSON twin and its figures.

    Args:
        results: The folder of all compact records.
        docs: The folder with the page.

    Returns:
        The files that were written.
    """
    records, written = read(results), []
    for scale, runs, table in _by_scale(records):
        if len(table):
            for name, figure in (("regrets", regrets(table)), ("rates", rates(runs, table))):
                written.append(docs / ASSETS / f"{name}-{scale}.png")
                write_atomically(written[-1], png(figure), "--docs")
    page, twin = docs / NAME, docs / "no-tuning.json"
    write_atomically(page, replaced(page.read_text(), markdown(records), BEGIN, END).encode(), "--docs")
    lines = ",\n".join(json.dumps(row) for row in rows(records))
    write_atomically(twin, f"[\n{lines}\n]\n".encode(), "--docs")
    return [*written, page, twin]


def regrets(table: Table) -> Figure:
    """Draw one row for each method, the best mean rank on top: a dot for each task, a bar at the mean."""
    order = standings(table).dropna(subset="rank")[::-1]
    with applied():
        figure, axes = panels_of(1, 1, width=8, height=0.3 * len(order) + 0.8)
        axis = axes[0][0]
        for place, (method, mean) in enumerate(order["regret"].items()):
            colour = COLOURS[0 if "APO" in str(method) else 1]
            found = table.loc[table["method"] == method, "regret"]
            axis.plot(found, [place] * len(found), "o", color=colour, alpha=0.55, markersize=5, linestyle="none")
            axis.plot([mean], [place], "|", color=colour, markersize=16, markeredgewidth=2.5)
        axis.axvspan(-1e3, NEAR, color=COLOURS[2], alpha=0.12, linewidth=0)
        axis.set_xscale("symlog", linthresh=1)
        axis.set_xlim(min(-1.0, 1.5 * table["regret"].min()), 130)
        axis.set_yticks(range(len(order)), list(order.index))
        axis.set_xlabel("regret in per cent of what the tuned rate learned (shaded: within 1%, or above it)")
    return figure


def rates(runs: Mapping[str, tuple[Recipe, Runs]], table: Table) -> Figure:
    """Draw the rate over the epochs, one panel for each task."""
    with applied():
        tasks = list(table.groupby("task", sort=False))
        figure, axes = panels_of(ceil(len(tasks) / _COLUMNS), min(_COLUMNS, len(tasks)), width=2.7, height=2.0)
        panels = [panel for row in axes for panel in row]
        for panel, (name, own) in zip(panels, tasks, strict=False):
            entries = dict(zip(own["method"], own["entry"], strict=True))
            for colour, pair in zip(COLOURS, _PAIRS.values(), strict=False):
                for method, line in zip(pair, ("-", "--"), strict=True):
                    if method in entries:
                        style = {"color": colour, "linestyle": line, "linewidth": 1.6}
                        # A cosine ends at zero, which a logarithmic axis cannot show.
                        shown = [
                            replace(one, rows=[row for row in one.rows if row["rate"] > 0])
                            for one in runs[str(name)][1][entries[method]]
                        ]
                        draw_band(panel, shown, "rate", style, method)
            panel.set_yscale("log")
            panel.set_title(str(name).removeprefix(f"{FAMILY}-"), fontsize="small")
        for panel in panels[len(tasks) :]:
            panel.set_visible(False)
        legend_below(figure, panels[0])
    return figure


def markdown(records: Sequence[Record]) -> str:
    """Return what is between the comments of the page."""
    return "\n\n".join(_scale(*one) for one in _by_scale(records)) or "No records of such runs are committed yet."


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return one row for each scale, task and method: what ``docs/no-tuning.json`` has."""
    found = []
    for scale, _, table in _by_scale(records):
        for score in table.drop(columns="rank", errors="ignore").to_dict("records"):
            about = {"scale": scale, "task": score["task"], "for_choosing": score["task"] in CHOOSING, **score}
            found.append({str(key): None if pandas.isna(entry) else rounded(entry) for key, entry in about.items()})
    return found


def _by_scale(records: Sequence[Record]) -> Iterator[tuple[str, Tasks, Table]]:
    """Yield each scale with records, the largest first, its runs and their scores."""
    for scale in reversed(SCALES):
        if any(record.config.scale == scale for record in records):
            runs = task_runs(RECIPES.values(), scale, records)
            yield scale, runs, scores(runs)


def _scale(scale: str, runs: Tasks, table: Table) -> str:
    blocks, tasks = [f"## Scale {scale}"], list(dict.fromkeys(table["task"])) if len(table) else []
    if tasks:
        overall = standings(table)
        untuned = list(overall.dropna(subset="rank").index)
        records = [record for name in tasks for group in runs[name][1].values() for record in group]
        chosen, held_out = (
            ", ".join(f"`{_short(name)}`" for name in tasks if (name in CHOOSING) == used) for used in (True, False)
        )
        blocks += [
            _origin(tasks, runs, table, records),
            _standings(overall),
            f"![Regrets of all methods]({ASSETS}/regrets-{scale}.png)",
            "### Task by task",
            f"For choosing settings of the library: {chosen or 'none of these'}. "
            f"Held out from that, only reported: {held_out or 'none'}. "
            "Test metric, and in brackets the regret in per cent; ± is the deviation over seeds.",
            _values(table),
            "Regret of every method without tuning, in per cent; **bold** is within 1% of the tuned rate or above it:",
            _by_task(table, untuned, _marked),
            "Training loss of the last epoch:",
            _by_task(
                table, [*TUNED, *untuned], lambda one: "" if isnan(one.train_loss) else figure_text(one.train_loss)
            ),
            f"![Learned rates and tuned ones, task by task]({ASSETS}/rates-{scale}.png)",
            command_block(record.header.get("command") or [] for record in records),
        ]
    missing = [f"`{name}`" for name in RECIPES if name not in tasks]
    if missing:
        blocks.append("Without all tuned rates yet: " + ", ".join(missing) + ".")
    return "\n\n".join(blocks)


def _origin(tasks: Sequence[str], runs: Tasks, table: Table, records: Sequence[Record]) -> str:
    seeds = sorted({len(group) for name in tasks for group in runs[name][1].values()})
    text = (
        f"{len(tasks)} of {len(RECIPES)} tasks, {len(records)} runs, {' or '.join(map(str, seeds))} "
        f"seed{'' if seeds == [1] else 's'} each, on {machines(records)}."
    )
    for entry in table.loc[table["method"] == "NadamW calibrated", "entry"][:1]:
        text += f" The rate that is best for NadamW over all tasks together is that of `{entry}`."
    return text


def _standings(overall: Table) -> str:
    header = ["Method", "Mean rank", "Mean regret, %", "Worst regret, %", "Within 1%", "Diverged or dead"]
    header += ["Mean regret at equal time, %", "Time"]
    body = [
        [
            str(one.Index),
            "tuned" if isnan(one.rank) else f"{one.rank:.1f}",
            f"{one.regret:.1f}",
            f"{one.worst:.1f} ({_short(one.worst_task)})",
            f"{one.near} of {one.tasks}",
            f"{one.dead} of {one.runs}",
            f"{one.regret_at_equal_time:.1f}",
            f"{one.relative_time:.2f}x",
        ]
        for one in overall.itertuples()
    ]
    return grid(header, body)


def _values(table: Table) -> str:
    """Return a table with one row for each task and one column for each of some methods."""
    body = []
    for task, own in table.groupby("task", sort=False):
        cells = {one.method: _value(one) for one in own.itertuples()}
        metric = own["metric"].iloc[0].replace("_", " ")
        body.append([f"`{_short(str(task))}`", metric, *(cells.get(method, "") for method in _SHOWN)])
    return grid(["Experiment", "Metric", *_SHOWN], body)


def _by_task(table: Table, methods: Sequence[str], cell: Callable[[Any], str]) -> str:
    """Return a table with one row for each method and one column for each task."""
    cells = {(one.method, one.task): cell(one) for one in table.itertuples()}
    tasks = list(dict.fromkeys(table["task"]))
    body = [[method, *(cells.get((method, task), "") for task in tasks)] for method in methods]
    return grid(["Method", *map(_short, tasks)], body)


def _value(score: Any) -> str:
    spread = "" if isnan(score.spread) else f" ± {score.spread:.2g}"
    rate = f" at {score.entry.rpartition('-cosine-')[2]}" if "tuned" in score.method else f" ({score.regret:.1f})"
    return f"{figure_text(None if isnan(score.mean) else score.mean)}{spread}{rate}"


def _marked(score: Any) -> str:
    text = "dead" if score.dead == score.runs else f"{score.regret:.1f}"
    return f"**{text}**" if score.regret <= NEAR else text


def _short(name: str) -> str:
    return name.removeprefix(f"{FAMILY}-")
