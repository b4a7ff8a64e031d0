"""The summary of the results: APO against the best other method, ours against the paper's, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from apo_experiments.publication.rows import Section, anchor, grid, words
from apo_experiments.recipe import NOT_IN_PAPER, Entry, Recipe
from apo_experiments.records import grouped
from apo_experiments.results import MARK, Result, figure_text

_HEADER = ["Experiment", "Metric", "APO, ours", "APO, paper", "Best other, ours", "Best other, paper"]


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
