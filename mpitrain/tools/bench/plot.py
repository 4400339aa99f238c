"""A picture of the parts of a step's time."""

from collections.abc import Sequence

from collectives.bench.kit.launches import alike
from collectives.shared.pictures import new_figure
from mpitrain.tools.bench.bench_report import PHASES, cases, heading, merged
from mpitrain.tools.bench.results import TrainingLaunch

COLOURS = ("#4c78a8", "#72b7b2", "#e45756", "#f2a541", "#bab0ac")


def plot(path: str, launches: Sequence[TrainingLaunch]) -> None:
    """Write a picture to `path`: for each case a stacked bar per contestant, medians over the launches. No picture without steps.

    Raises OSError, UsageError; ValueError for launches that cannot be compared.
    """
    if alike(launches)[1:]:
        raise ValueError("bench: --plot needs launches on the same kind of machine with the same ranks; these differ")
    all_cases = cases(launches)
    if not all_cases:
        return
    figure = new_figure(max(6.5, 5.5 * len(all_cases)), 4.5)
    figure.suptitle(heading(launches), fontsize="medium")
    for place, case in enumerate(all_cases, 1):
        axes = figure.add_subplot(1, len(all_cases), place)
        rows = merged(launches, case)
        bottom = [0.0] * len(rows)
        for (name, of), colour in zip(PHASES.items(), COLOURS, strict=True):
            heights = [max(0.0, getattr(row.phases, of) or 0.0) * 1e3 for row in rows]
            label = "communication, waiting" if name == "comm" else name
            axes.bar([row.name for row in rows], heights, 0.65, bottom=bottom, color=colour, label=label)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        for i, row in enumerate(rows):
            unknown = "*" if row.phases.comm_s is None and row.name != "none" else ""
            axes.text(i, bottom[i], f"{row.step_s * 1e3:,.0f}{unknown}", ha="center", va="bottom", fontsize="small")
        axes.set_ylabel("ms a step")
        axes.set_title(str(case), fontsize="small")
        axes.margins(y=0.1)
        axes.spines[["top", "right"]].set_visible(False)
        if place == 1:
            axes.legend(fontsize="small", frameon=False)
    figure.supxlabel("* communication is within the other parts", fontsize="small")
    figure.savefig(path, format="png", dpi=120)
