"""Bandwidth against size as a picture. Needs matplotlib, which is imported only here and only when asked for."""

from math import ceil

from collectives.bench.results import GLOO, RAW, Launch
from collectives.bench.show import ranks_on
from collectives.bench.units import show_bytes


class NoMatplotlibError(Exception):
    """matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__("--plot needs matplotlib: pip install 'mpitrain[plot]', or leave out --plot")


def need_matplotlib() -> None:
    """NoMatplotlibError if it cannot be imported: found before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoMatplotlibError from None


def plot(path: str, launch: Launch) -> None:
    """Write a picture to `path`: for each operation and dtype busbw of each contestant against the size. OSError, NoMatplotlibError."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys((row.operation, row.dtype) for row in launch.results))
    num_columns = min(2, len(cases))
    num_rows = ceil(len(cases) / num_columns)
    figure = Figure(figsize=(7 * num_columns, 4.5 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, case in enumerate(cases, 1):
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
        axes.set_title(f"{case[0]}, {case[1]}, {ranks_on(launch)}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
