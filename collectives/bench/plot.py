"""Draws bandwidth against size."""

from collections.abc import Sequence
from math import ceil

from collectives.bench.results import GLOO, RAW, CollectivesLaunch
from collectives.shared.pictures import new_figure
from collectives.texts import show_bytes


def plot(path: str, launches: Sequence[CollectivesLaunch]) -> None:
    """Write a picture to `path`: busbw against the size, for each launch, operation and dtype. OSError, UsageError."""
    cases = [
        (launch, case)
        for launch in launches
        for case in dict.fromkeys((row.operation, row.dtype) for row in launch.results)
    ]
    num_columns = min(2, len(cases))
    num_rows = ceil(len(cases) / num_columns)
    figure = new_figure(7 * num_columns, 4.5 * num_rows)
    for place, (launch, case) in enumerate(cases, 1):
        axes = figure.add_subplot(num_rows, num_columns, place)
        group = [row for row in launch.results if (row.operation, row.dtype) == case]
        for algorithm, memory in dict.fromkeys((row.algorithm, row.memory) for row in group):
            rows = [row for row in group if (row.algorithm, row.memory) == (algorithm, memory)]
            style = "--" if algorithm in (RAW, GLOO) else "-" if memory == "private" else ":"
            axes.plot(
                [row.nbytes for row in rows],
                [row.busbw / 1e9 for row in rows],
                style,
                marker=".",
                linewidth=2.5 if algorithm == "auto" else 1.2,
                label=algorithm if memory == "private" else f"{algorithm} ({memory})",
            )
        sizes = sorted({row.nbytes for row in group})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [show_bytes(size) for size in sizes], rotation=45)
        axes.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("busbw GB/s")
        axes.set_title(f"{case[0]}, {case[1]}, {launch.ranks_on_nodes}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
