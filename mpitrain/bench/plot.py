"""Where a step's time goes as a picture. Needs matplotlib, which is imported only here and only when asked for."""

from collections.abc import Sequence

from collectives.bench.plot import need_matplotlib
from mpitrain.bench.report import PHASES, cases, heading, merged
from mpitrain.bench.results import Launch

COLOURS = ("#4c78a8", "#72b7b2", "#e45756", "#f2a541", "#bab0ac")


def plot(path: str, group: Sequence[Launch]) -> None:
    """Write a picture to `path`: for each case a stacked bar a contestant, medians over the launches. OSError, NoMatplotlibError."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    all_cases = cases(group)
    figure = Figure(figsize=(max(6.5, 5.5 * len(all_cases)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(heading(group), fontsize="medium")
    for place, case in enumerate(all_cases, 1):
        axes = figure.add_subplot(1, len(all_cases), place)
        rows = merged(group, case)
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
