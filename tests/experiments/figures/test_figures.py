"""Figures show what the records hold, and cope with whatever is missing from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib.colors import to_hex
from tests.experiments.figures import made_up

from apo_experiments import figures
from apo_experiments.figures.curves import draw_band
from apo_experiments.figures.style import COLOURS, grid
from apo_experiments.recipe import Entry
from apo_experiments.renamed import rates_of_today

SGD, ADAM, APO = Entry("SGDm", "sgdm", paper=75.7), Entry("Adam", "adam"), Entry("SGDm-APO", "sgdm-apo", paper=77.4)
RECIPE = made_up.recipe([SGD, ADAM, APO])
RUNS = [
    made_up.training(entry, seed, speed) for entry, speed in ((SGD, 0.1), (ADAM, 0.2), (APO, 0.3)) for seed in (0, 1, 2)
]


def lines(axes) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axes.get_lines() if len(line.get_ydata()) > 1}


def test_curves_show_loss_metric_and_rate_of_every_entry():
    figure = figures.draw(RECIPE, RUNS)
    names = [axes.get_ylabel() for axes in figure.axes]
    assert names == ["training loss", "test accuracy", "learning rate"]
    for axes in figure.axes:
        assert set(lines(axes)) == {"SGDm", "Adam", "SGDm-APO"}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["SGDm", "Adam", "SGDm-APO"]


def test_a_line_is_the_mean_over_seeds_and_its_band_goes_from_the_least_to_the_greatest():
    _, ((axes,),) = grid(1, 1)
    draw_band(axes, RUNS[:3], "test_accuracy", {"color": "black"})
    middle = [run.rows[4]["test_accuracy"] for run in RUNS[:3]]
    assert axes.get_lines()[0].get_ydata()[4] == pytest.approx(sum(middle) / 3)
    vertices = axes.collections[0].get_paths()[0].vertices
    heights = [y for x, y in vertices if x == 5.0]
    assert (min(heights), max(heights)) == pytest.approx((min(middle), max(middle)))


def test_one_seed_has_no_band_and_one_epoch_has_a_mark():
    _, ((axes,),) = grid(1, 1)
    draw_band(axes, [made_up.training(SGD, 0, epochs=1)], "train_loss", {"color": "black"})
    assert not axes.collections
    assert axes.get_lines()[0].get_marker() == "o"


def test_apo_is_the_thick_unbroken_line_in_its_own_colour():
    styles = {line.get_label(): line for line in figures.draw(RECIPE, RUNS).axes[0].get_lines()}
    assert to_hex(styles["SGDm-APO"].get_color()).upper() == COLOURS[0]
    assert styles["SGDm-APO"].get_linestyle() == "-"
    assert styles["SGDm-APO"].get_linewidth() > styles["SGDm"].get_linewidth()
    assert styles["SGDm"].get_linestyle() != "-"
    assert len({to_hex(line.get_color()) for line in styles.values()}) == 3


def test_many_entries_are_divided_by_base_optimizer():
    bases = ("sgd", "sgdm", "rmsprop", "adam")
    entries = [
        Entry(f"{base} {kind}", base + suffix)
        for base in bases
        for kind, suffix in (("fixed", ""), ("step", ""), ("APO", "-apo"))
    ]
    figure = figures.draw(made_up.recipe(entries), [made_up.training(entry, 0) for entry in entries])
    assert len(figure.axes) == 4 * 3
    assert set(lines(figure.axes[0])) == {"sgd fixed", "sgd step", "sgd APO"}


def test_a_diverging_run_does_not_squeeze_the_others():
    wild = made_up.training(ADAM, 0)
    rows = [{**row, "train_loss": 10.0 ** row["epoch"]} for row in wild.rows]
    figure = figures.draw(RECIPE, [*RUNS, replace(wild, rows=rows)])
    assert figure.axes[0].get_ylim()[1] < 100


def test_numbers_that_are_not_finite_are_left_out():
    holes = made_up.training(SGD, 0)
    holes.rows[3]["train_loss"] = None
    figure = figures.draw(RECIPE, [holes])
    assert len(lines(figure.axes[0])["SGDm"]) == 19


def test_bars_show_seeds_mean_and_the_paper():
    diverged = made_up.record(ADAM, 0, [], {"test_accuracy": None})
    figure = figures.draw(RECIPE, [*RUNS[:3], diverged, *RUNS[6:]], "bars")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["SGDm", "Adam", "SGDm-APO"]
    diamonds = [line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() == "D"]
    assert diamonds == [75.7, 77.4]
    means = [line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() == "|"]
    finals = [run.summary["metrics"]["test_accuracy"] for run in RUNS[:3]]
    assert means[0] == pytest.approx(sum(finals) / 3)
    assert [text.get_text() for text in axes.texts] == ["diverged"]


def test_the_rate_of_a_preconditioner_is_not_its_lr():
    entry = Entry("APO-Precond", "apo-precond", {"lr": 1.0, "scale": 0.9})
    rows = [{"kind": "row", "epoch": e, "train_loss": 1.0, "rate": 1.0, "apo/P/mean": 0.1 * e} for e in (1, 2)]
    before = made_up.record(entry, 0, rows, {"test_accuracy": 75.0})
    old = replace(before, rows=rates_of_today(before.rows, entry.hyper))
    figure = figures.draw(made_up.recipe([entry]), [old], "curves")
    axes = figure.axes[-1]
    assert axes.get_ylabel() == "learning rate or mean of P"
    assert list(axes.get_lines()[0].get_ydata()) == pytest.approx([0.09, 0.18])


def test_ablation_has_a_row_for_each_option_that_differs():
    entries = [
        Entry("base", "apo-precond", {"fsd_weight": 0.1, "wsd_weight": 0.0, "lr": 1.0}),
        Entry("more FSD", "apo-precond", {"fsd_weight": 1.0, "wsd_weight": 0.0, "lr": 1.0}),
        Entry("less FSD", "apo-precond", {"fsd_weight": 0.01, "wsd_weight": 0.0, "lr": 1.0}),
        Entry("WSD", "apo-precond", {"fsd_weight": 0.1, "wsd_weight": 1.0, "lr": 1.0}),
    ]
    runs = [made_up.training(entry, seed) for entry in entries for seed in (0, 1)]
    figure = figures.draw(made_up.recipe(entries, figure="ablation"), runs)
    assert len(figure.axes) == 2 * 3
    finals = figure.axes[2::3]
    assert [axes.get_xlabel() for axes in finals] == ["fsd weight", "wsd weight"]
    ticks = [[text.get_text() for text in axes.get_xticklabels()] for axes in finals]
    assert ticks == [["0.01", "0.1", "1.0"], ["0.0", "1.0"]]  # by size, and only what differs in this option alone


def test_ablation_of_two_series_shows_both():
    entries = [
        Entry(f"{preset} {lr}", "sgdm-apo", {"preset": preset, "lr": lr})
        for preset in ("default", "paper")
        for lr in (1e-6, 1e-3, 1.0)
    ]
    runs = [made_up.training(entry, 0) for entry in entries]
    figure = figures.draw(made_up.recipe(entries, figure="ablation"), runs)
    legends = [{text.get_text() for text in axes.get_legend().get_texts()} for axes in figure.axes[::3]]
    assert legends == [
        {"default 1e-06", "paper 1e-06"},
        {f"default {lr}" for lr in (1e-6, 1e-3, 1.0)},
        {f"paper {lr}" for lr in (1e-6, 1e-3, 1.0)},
    ]


def test_ablation_of_options_that_change_together_shows_all_entries():
    entries = [Entry(f"{a} {b}", "sgdm", {"a": a, "b": b}) for a, b in ((1, "x"), (2, "y"), (3, "z"))]
    figure = figures.draw(made_up.recipe(entries), [made_up.training(entry, 0) for entry in entries], "ablation")
    assert len(figure.axes) == 6
    assert [text.get_text() for text in figure.axes[5].get_xticklabels()] == ["x", "y", "z"]


def test_rosenbrock_shows_loss_on_a_logarithmic_axis_and_paths_from_the_start():
    rows = [
        {"step": 10 * i, "objective": 625.0 * 0.1**i, "rate": 1e-3, "x": 1.0, "y": -1.5 + 0.2 * i} for i in range(1, 13)
    ]
    entry = Entry("SGD", "sgd")
    run = made_up.record(entry, 0, rows, {"objective": 1e-9}, options={"start": [1.0, -1.5]})
    figure = figures.draw(made_up.recipe([entry], metric="objective", goal="min", figure="rosenbrock"), [run])
    loss, rate, path = figure.axes
    assert loss.get_yscale() == "log" and loss.get_xlabel() == "step" and rate.get_ylabel() == "learning rate"
    assert list(path.get_lines()[0].get_ydata())[:2] == [-1.5, pytest.approx(-1.3)]
    assert len(path.get_lines()[0].get_ydata()) == 13


def test_figure_1_divides_updates_by_their_proximal_terms_and_orders_them_by_strength():
    def update(label: str, fsd: float, wsd: float):
        entry = Entry(label, "exact", {"fsd_weight": fsd, "wsd_weight": wsd})
        rows = [{"step": 0, "x": 0.0, "old": 0.0, "new": fsd + wsd}, {"step": 1, "x": 1.0, "old": 1.0, "new": 1.0}]
        rows.append({"step": 2, "data_x": 0.5, "data_y": 0.5})
        return entry, made_up.record(entry, 0, rows, {"example_x": 0.0, "example_y": 1.5})

    made = [update("weak", 0.0, 0.1), update("strong", 0.0, 10.0), update("both", 1.0, 1.0), update("FSD", 1.0, 0.0)]
    recipe = made_up.recipe([entry for entry, _ in made], figure="figure-1", metric="example_loss", goal="min")
    figure = figures.draw(recipe, [run for _, run in made])
    assert [axes.get_title() for axes in figure.axes] == ["WSD", "FSD + WSD", "FSD"]
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["before", "strong", "weak", "new example"]


def test_the_same_records_give_the_same_bytes():
    assert figures.rendered(figures.draw(RECIPE, RUNS), "svg") == figures.rendered(figures.draw(RECIPE, RUNS), "svg")


def test_drawing_leaves_the_users_matplotlib_settings_alone():
    import matplotlib

    with matplotlib.rc_context({"font.size": 23, "axes.grid": False}):
        figures.rendered(figures.draw(RECIPE, RUNS), "svg")
        assert matplotlib.rcParams["font.size"] == 23 and not matplotlib.rcParams["axes.grid"]


@pytest.mark.parametrize("name", sorted(figures.FIGURES))
def test_every_figure_copes_with_runs_that_have_hardly_begun(name):
    begun = made_up.record(SGD, 0, made_up.training(SGD, 0, epochs=1).rows, None)
    assert figures.rendered(figures.draw(RECIPE, [begun], name), "svg").startswith(b"<?xml")
