"""The report as HTML: no script, no font and no picture from elsewhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

from apo_experiments.comparable import MARK
from apo_experiments.figures.curves import axis_name
from apo_experiments.progress import counted, duration
from apo_experiments.recipe import NOT_IN_PAPER
from apo_experiments.report.sections import Part, Section
from apo_experiments.report.style import CSS
from apo_experiments.results import figure_text, leader


def page(sections: Sequence[Section]) -> str:
    """Return the whole page."""
    run = sum(bool(section.parts) for section in sections)
    today = datetime.now(timezone.utc).strftime("%d %B %Y").lstrip("0")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Amortized Proximal Optimization: our runs beside the paper</title>
<style>{CSS}</style>
</head>
<body>
<nav aria-label="Contents"><strong>Contents</strong><ul>{"".join(map(_link, sections))}</ul></nav>
<header>
<h1>Amortized Proximal Optimization: our runs beside the paper</h1>
<p class="muted">{run} of {len(sections)} recipes have results; page written on {today}.</p>
<p>Each recipe repeats a figure or table of Bae, Vicol, HaoChen and Grosse (2022). Lines and figures are means over
seeds, bands and ranges go from the least seed to the greatest. Methods that use APO are set off by colour, the best
mean is bold. A figure of the paper in brackets belongs to another setting than ours (a larger network, more data, more
epochs), and {MARK} marks methods that are not the paper's. Where our runs do not show what the paper claims, the text
says so.</p>
</header>
<div class="overview scroll">{_overview(sections)}</div>
<main>
{"".join(map(_section, sections))}
</main>
</body>
</html>
"""


def _link(section: Section) -> str:
    name = escape(section.recipe.name)
    return f"<li{'' if section.parts else ' class=muted'}><a href='#{name}'>{name}</a></li>"


def _overview(sections: Iterable[Section]) -> str:
    rows = []
    for section in sections:
        recipe = section.recipe
        cells = [f'<th><a href="#{escape(recipe.name)}">{escape(recipe.name)}</a></th>', _cell(recipe.paper)]
        if section.parts:
            part = section.parts[0]
            best, theirs = leader(recipe, part.results), leader(recipe, part.results, paper=True)
            ours = f"{best.name} {figure_text(best.mean)}" if best and part.scale != "smoke" else "-"
            paper = f"{theirs.label} {theirs.paper_text}" if theirs else "-"
            cells += [_cell(part.scale), _cell(axis_name(recipe.metric)), _cell(ours), _cell(paper)]
        else:
            cells += ['<td colspan="4" class="muted">not run yet</td>']
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return _table(["Recipe", "In the paper", "Scale", "Metric", "In front here", "In front in the paper"], rows)


def _section(section: Section) -> str:
    recipe = section.recipe
    # A claim is the paper's until the runs below show it.
    whose = "The paper's claim: " if recipe.paper != NOT_IN_PAPER else ""
    notes = f"<p>{escape(whose + recipe.notes)}</p>" if recipe.notes else ""
    if section.parts:
        body = "".join(_part(section, part) for part in section.parts)
    else:
        commands = escape("\n".join(section.commands()))
        body = f'<div class="todo">Not run yet. To run it, run one of these commands:<pre>{commands}</pre></div>'
    return f"""<section id="{escape(recipe.name)}">
<h2>{escape(recipe.title or recipe.name)}</h2>
<p class="origin">{escape(recipe.name)} · {escape(recipe.paper)}</p>
{notes}{body}
</section>
"""


def _part(section: Section, part: Part) -> str:
    figure = ""
    if part.figure:
        data = base64.b64encode(part.figure).decode()
        about = escape(f"{section.recipe.title or section.recipe.name}, scale {part.scale}")
        figure = f'<figure><img alt="{about}" src="data:image/svg+xml;base64,{data}"></figure>'
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in part.findings)
    others = f"<p class='muted'>Not shown: {counted(part.others, 'run')} with other settings (sweeps, --set).</p>"
    return f"""<h3>Scale {escape(part.scale)}</h3>
{figure}
<div class="scroll">{_results(section, part)}</div>
<ul class="findings">{sentences}</ul>
{others if part.others else ""}
<p class="muted">To repeat it ({duration(part.seconds)} of training):</p>
<pre>{escape(part.command(section.recipe))}</pre>
<details><summary>Hyperparameters</summary>{_settings(part)}</details>
<details><summary>Where the runs come from</summary>{_origins(part)}</details>
"""


def _results(section: Section, part: Part) -> str:
    recipe = section.recipe
    best, theirs = leader(recipe, part.results), leader(recipe, part.results, paper=True)
    better = "less is better" if recipe.goal == "min" else "more is better"
    header = ["Method", f"{axis_name(recipe.metric).capitalize()} ({better})", "Seed to seed", "Seeds"]
    rows = []
    for result in part.results:
        count = str(len(result.values)) + (f", {result.diverged} diverged" if result.diverged else "")
        cells = [
            f"<th>{escape(result.name)}</th>",
            _number(figure_text(result.mean), result is best),
            _cell(result.spread()),
            _cell(count),
        ]
        if theirs:
            cells.append(_number(result.paper_text, result is theirs))
        kind = ' class="ours"' if "apo" in section.entry(result.label).method else ""
        rows.append(f"<tr{kind}>{''.join(cells)}</tr>")
    return _table([*header, "Paper"] if theirs else header, rows, numbers=(1, 4))


def _settings(part: Part) -> str:
    """Write what differs between the methods as a table, and what they share as one line."""
    settings = part.settings()
    keys = list(dict.fromkeys(key for _, setting in settings for key in setting))
    shared = [key for key in keys if len({_text(s.get(key, _ABSENT)) for _, s in settings}) == 1]
    line = ", ".join(f"{key} {_text(settings[0][1][key])}" for key in shared)
    differing = [key for key in keys if key not in shared]
    rows = [
        f"<tr><th>{escape(label)}</th>{''.join(_cell(_text(setting.get(key, _ABSENT))) for key in differing)}</tr>"
        for label, setting in settings
    ]
    table = f'<div class="scroll">{_table(["Method", *differing], rows)}</div>' if differing else ""
    return (f"<p>All methods: {escape(line)}.</p>" if line else "") + table


def _origins(part: Part) -> str:
    pairs = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in part.origins())
    return f"<dl>{pairs}</dl>"


_ABSENT = object()


def _text(setting: Any) -> str:
    if setting is _ABSENT:
        return ""
    return setting if isinstance(setting, str) else json.dumps(setting, default=str)


def _table(header: Sequence[str], rows: Iterable[str], numbers: Sequence[int] = ()) -> str:
    cells = "".join(
        f"<th{' class=number' if index in numbers else ''}>{escape(name)}</th>" for index, name in enumerate(header)
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _number(text: str, best: bool) -> str:
    return f'<td class="number">{f"<b class=best>{text}</b>" if best else text}</td>'
