"""Draws time against size."""

from collections.abc import Mapping, Sequence

from collectives.shared.pictures import new_figure
from collectives.shared.terminal import UsageError
from collectives.shared.units import show_seconds
from collectives.texts import show_bytes


def draw(path: str, title: str, subtitle: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Write a picture to `path`, in the format of its suffix: for each name a line of (bytes, seconds), both axes logarithmic.

    UsageError if matplotlib is missing or cannot write this format.
    """
    figure = new_figure(9, 5.5)
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes = figure.add_subplot()
    for (name, points), marker in zip(lines.items(), "os^vDPX*<>" * len(lines), strict=False):
        nbytes, seconds = zip(*points, strict=True)
        axes.plot(nbytes, seconds, marker=marker, markersize=4, linewidth=1.6, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({nbytes for points in lines.values() for nbytes, _ in points}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_bytes(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_seconds(value)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", rotation=45)
    axes.set_xlabel("size of the whole array")
    axes.set_ylabel("time")
    axes.grid(which="major", alpha=0.3)
    axes.set_title(f"{title}\n", fontsize=12)
    axes.text(0.5, 1.02, subtitle, transform=axes.transAxes, ha="center", fontsize=8, color="dimgray")
    axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise UsageError(f"--plot {path}: {error}") from None
