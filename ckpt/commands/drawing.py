"""A tensor's histogram as a picture. It needs matplotlib, which is imported only here and only for this option."""

from pathlib import Path

import numpy as np

from ckpt.check.statistics import Histogram, Statistics
from ckpt.commands.terminal import UsageError, shape_text
from ckpt.reading.entry import TensorEntry
from ckpt.storage.catalog import check_outside


def check_drawing(path: str) -> None:
    """UsageError if matplotlib cannot be imported, or `path` lies in a checkpoint. This check comes before all reads."""
    try:
        check_outside(Path(path).parent)
    except ValueError as error:
        raise UsageError(f"--histogram {path}: {error}") from None
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--histogram needs matplotlib ({error}): pip install 'mpitrain[plot]'") from None


@np.errstate(over="ignore", invalid="ignore")  # matplotlib adds edges, which may be very large
def draw_histogram(path: str, entry: TensorEntry, stats: Statistics, histogram: Histogram) -> None:
    """Write a picture to `path` in the format of its suffix. UsageError if matplotlib cannot write this format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if histogram.counts:
        axes.stairs(histogram.counts, histogram.edges, fill=True)
    axes.set_xlabel("value")
    axes.set_ylabel("elements in each bin")
    axes.grid(alpha=0.3)
    others = f", {stats.num_nan} NaN, {stats.num_inf} infinite" if stats.num_nan or stats.num_inf else ""
    moments = "no finite value" if stats.mean is None else f"mean {stats.mean:.5g}, std {stats.std:.5g}"
    # matplotlib would treat a part of some names as a formula.
    title = f"{entry.name}\n{entry.dtype.name}, {shape_text(entry.shape)}: {moments}{others}"
    axes.set_title(title, fontsize=10, parse_math=False)
    try:
        figure.savefig(path)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"--histogram {path}: {error}") from None
