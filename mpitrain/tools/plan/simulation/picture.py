"""A picture of a simulation: where the time of the run goes, how long its steps take, and its progress."""

import os

import numpy as np

from collectives.shared.pictures import new_figure
from mpitrain.tools.plan.simulation.outcome import Outcome

_COLOURS = (
    "#4c78a8", "#9ecae9", "#72b7b2", "#e45756", "#f2cf5b", "#f2a541", "#b279a2", "#54a24b", "#bab0ac", "#d67195", "#79706e",
)  # fmt: skip


def draw(outcome: Outcome, path: str | os.PathLike[str]) -> None:
    """Write the picture to `path`, as SVG. OSError; UsageError if matplotlib is missing."""
    job, run = outcome.job, outcome.run
    figure = new_figure(11, 6.5)
    figure.suptitle(
        f"{job.schedule.name}, {job.num_ranks:,} ranks: {outcome.goodput:.1%} of {run.total_s / 3600:,.0f} hours in steps that count"
    )
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.3))
    causes = figure.add_subplot(grid[0, :])
    left = 0.0
    for (name, share), colour in zip(outcome.shares.items(), _COLOURS, strict=True):
        if share > 0:
            causes.barh(0, share, left=left, color=colour, label=f"{name} {share:.1%}")
            left += share
    causes.set(xlim=(0, max(left, 1.0)), yticks=[], xlabel="share of the run's time, mean of the ranks")
    causes.xaxis.set_major_formatter("{x:.0%}")
    causes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small", frameon=False)

    steps = figure.add_subplot(grid[1, 0])
    if np.ptp(outcome.step_s):
        steps.hist(outcome.step_s, bins="auto", color=_COLOURS[0])
    steps.axvline(outcome.mean_step_s, color="black", linestyle="--", label=f"mean {outcome.mean_step_s:.4g} s")
    steps.set(xlabel="seconds of a step", ylabel=f"of {len(outcome.step_s):,} simulated steps")
    steps.set_title(
        f"{outcome.ideal_s:.4g} s without disturbances, {outcome.with_jitter_s:.4g} s with jitter alone, "
        f"{outcome.with_slow_s:.4g} s with slow ranks alone",
        fontsize="small",
    )
    steps.legend(fontsize="small", frameon=False)

    progress = figure.add_subplot(grid[1, 1])
    hours, done = np.array(run.progress).T
    hours = hours / 3600
    progress.plot(
        hours, hours * 3600 / outcome.ideal_s, color=_COLOURS[7], linestyle="--", label="without disturbances"
    )
    progress.plot(hours, done, color=_COLOURS[0], label=f"this run, {run.failures:,} failures")
    progress.set(xlabel="hours", ylabel="steps that count", ylim=(0, None))
    progress.legend(fontsize="small", frameon=False)
    for axes in (causes, steps, progress):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg")
