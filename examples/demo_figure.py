"""The figure of the demo: training loss and learned rate over time, for all initial rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from demo_report import summaries
from demo_training import OPTIMIZERS, PRECONDITIONED, Run
from matplotlib import pyplot
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

APO_COLOUR, PRECONDITIONED_COLOUR = "#D55E00", "#0072B2"  # from Okabe and Ito's palette for all kinds of colour vision
LOSS_RANGE = (1e-3, 20.0)  # fixed rates that diverge go up to 1e6


def draw(runs: list[Run], file: Path) -> None:
    """Draw one column for each optimizer: losses above, rates below."""
    rates = sorted({run.job.rate for run in runs if not run.job.tuned})
    colours = ScalarMappable(LogNorm(rates[0], rates[-1]), "viridis")
    figure, axes = pyplot.subplots(2, len(OPTIMIZERS), figsize=(10, 7), sharey="row", layout="constrained")
    for column, optimizer in enumerate(OPTIMIZERS):
        _draw_losses(axes[0, column], runs, optimizer, colours)
        _draw_rates(axes[1, column], runs, optimizer, colours)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("rate that APO uses")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.colorbar(colours, ax=axes, label="initial rate", aspect=40)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _draw_losses(axis: Any, runs: list[Run], optimizer: str, colours: ScalarMappable) -> None:
    for index, summary in enumerate(summaries(runs, optimizer, tuned=False)):
        label = None if index else "fixed rates, coloured by rate"
        axis.plot(summary.losses, color=colours.to_rgba(summary.rate), linewidth=1, label=label)  # type: ignore
    for index, summary in enumerate(summaries(runs, optimizer, tuned=True)):
        label = None if index else "APO, from each of these rates"
        axis.plot(summary.losses, color=APO_COLOUR, linewidth=2.5, label=label)
    for summary in summaries(runs, PRECONDITIONED, tuned=True):
        axis.plot(summary.losses, color=PRECONDITIONED_COLOUR, linewidth=2, linestyle="--", label="APO-Precond")
    axis.set(title=optimizer, xlabel="epoch", yscale="log", ylim=LOSS_RANGE)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.25)


def _draw_rates(axis: Any, runs: list[Run], optimizer: str, colours: ScalarMappable) -> None:
    enlarged = axis.inset_axes((0.52, 0.69, 0.45, 0.23))
    for summary in summaries(runs, optimizer, tuned=True):
        lead = summary.steps[-1] / 15  # room to the left, where the warm start jumps from the initial rate
        colour = colours.to_rgba(summary.rate)
        axis.plot([-lead, 0], [summary.rate, summary.rates[0]], color=colour, marker="o", markevery=[0], linewidth=1)
        axis.plot(summary.steps, summary.rates, color=APO_COLOUR, linewidth=2.5)
        enlarged.plot(summary.steps, summary.rates, color=APO_COLOUR, linewidth=1.5)
    enlarged.set_title("the same, enlarged", fontsize="small")
    enlarged.set_ylim(0, 1.15 * enlarged.get_ylim()[1])
    enlarged.tick_params(labelsize="small")
    axis.axvline(0, color="0.6", linewidth=0.8)
    axis.set(xlabel="training step (left of 0: warm start)", yscale="log")
    axis.grid(alpha=0.25)
