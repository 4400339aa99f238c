"""`show DIR [TENSOR]`: shows the contents of one checkpoint, or one tensor of it; with `--stats`, statistics of the values."""

import argparse
import difflib
import json
import time
from typing import Any

import numpy as np
from rich.text import Text

from ckpt.check.statistics import Histogram, Statistics, histogram_of, statistics_of
from ckpt.commands.drawing import check_drawing, draw_histogram
from ckpt.commands.terminal import (
    Commands,
    UsageError,
    add_checkpoint,
    add_json,
    age_text,
    can_print,
    new_table,
    print_json,
    print_table,
    printable,
    shape_text,
    shown_progress,
    size_text,
)
from ckpt.format.boxes import Box
from ckpt.format.manifest import CheckpointError
from ckpt.reading.checkpoint import Checkpoint, open_checkpoint
from ckpt.reading.entry import TensorEntry
from ckpt.storage.catalog import find
from collectives.version import newer_release, release

_PREVIEW = 6  # values along each of the last two dimensions
_BINS, _BAR_WIDTH = 16, 50  # bins and bar of the histogram on the terminal
_PICTURE_BINS = 100
_META_WIDTH = 200  # characters of a value of the meta; --json prints all


def add_to(commands: Commands) -> None:
    """Make the command's parser."""
    parser = commands.add_parser("show", help="show the contents of one checkpoint, or one tensor of it")
    add_checkpoint(parser)
    parser.add_argument("tensor", metavar="TENSOR", nargs="?", help="a tensor's name: show its blocks and first values")
    parser.add_argument(
        "--stats",
        action="store_true",
        help="mean, standard deviation, extremes of the finite values, counts of NaN and infinity; for one tensor a histogram",
    )
    parser.add_argument(
        "--histogram", metavar="FILE.png", help="draw a histogram of TENSOR's finite values (needs matplotlib)"
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    if args.histogram and args.tensor is None:
        raise UsageError("--histogram draws one tensor: python -m ckpt show DIR TENSOR --histogram FILE.png")
    checkpoint = open_checkpoint(find(args.dir))
    if args.tensor is None:
        _show_checkpoint(checkpoint, args.stats, args.json)
    else:
        _show_tensor(_named(checkpoint, args.tensor), args.stats, args.histogram, args.json)


def _named(checkpoint: Checkpoint, name: str) -> TensorEntry:
    if name in checkpoint:
        return checkpoint[name]
    near = difflib.get_close_matches(name, checkpoint.names, n=3, cutoff=0.5)
    raise CheckpointError(
        f"{checkpoint.path} has no tensor {name!r}" + (f"; nearest: {', '.join(near)}" if near else "")
    )


def _show_checkpoint(checkpoint: Checkpoint, with_stats: bool, as_json: bool) -> None:
    stats: dict[str, Statistics] = {}
    if with_stats:
        with shown_progress("reading", checkpoint.nbytes) as progress:
            stats = {name: statistics_of(entry, progress) for name, entry in checkpoint.items()}
    if as_json:
        print_json(
            {
                "path": str(checkpoint.path),
                "saved": checkpoint.saved,
                "bytes": checkpoint.nbytes,
                "ranks": checkpoint.num_ranks,
                "release": checkpoint.release,
                "files": checkpoint.files,
                "meta": checkpoint.meta,
                "tensors": {name: _json(entry, stats.get(name)) for name, entry in checkpoint.items()},
            }
        )
        return
    print(f"{printable(str(checkpoint.path))}")
    age = age_text(time.time() - checkpoint.saved)
    ranks = f" by {checkpoint.num_ranks} rank{'s' * (checkpoint.num_ranks > 1)}" * (checkpoint.num_ranks > 0)
    print(f"{len(checkpoint)} tensors, {size_text(checkpoint.nbytes)}, saved{ranks} {age} ago{_release(checkpoint)}")
    for key, value in checkpoint.meta.items():
        text = json.dumps(value)
        print(f"  {printable(key)}: {text if len(text) <= _META_WIDTH else text[:_META_WIDTH] + ' ...'}")
    if stats:
        table = new_table("TENSOR", "DTYPE", "SHAPE>", "MEAN>", "STD>", "MIN>", "MAX>", "NAN>", "INF>")
    else:
        axes = ["AXES"] if any(entry.axes for entry in checkpoint.values()) else []
        table = new_table("TENSOR", "DTYPE", "SHAPE>", "SIZE>", "BLOCKS>", "FILES", *axes)
    groups = _groups(checkpoint)
    for name, entry in checkpoint.items():
        for group in [group for group in groups if name.startswith(group)]:
            count, nbytes = groups.pop(group)
            table.add_row(
                Text(printable(group)), "", f"{count} tensors", *([] if stats else [size_text(nbytes)]), style="bold"
            )
        what = Text(printable(name)), entry.dtype.name, shape_text(entry.shape)
        table.add_row(*what, *(_stats_cells(stats[name]) if stats else _placement_cells(entry)))
    print_table(table)


def _release(checkpoint: Checkpoint) -> str:
    """The release that wrote a checkpoint, as words; "" if it is unknown."""
    if not checkpoint.release:
        return ""
    newer = f", newer than {release()} here" if newer_release(checkpoint.release) else ""
    return f" by mpitrain {printable(checkpoint.release)}{newer}"


def _groups(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """The groups in the tensors' names, such as "model/", outer ones first: the number of their tensors and bytes."""
    groups: dict[str, tuple[int, int]] = {}
    for name, entry in checkpoint.items():
        parts = name.split("/")
        for i in range(1, len(parts)):
            group = "/".join(parts[:i]) + "/"
            count, nbytes = groups.get(group, (0, 0))
            groups[group] = count + 1, nbytes + entry.nbytes
    return groups


def _placement_cells(entry: TensorEntry) -> list[str]:
    """Bytes, number of blocks, the first of their files and the number of others, and the mesh axis of each dimension if known."""
    files = list(dict.fromkeys(file for file, _ in entry.blocks))
    more = f" +{len(files) - 1}" if len(files) > 1 else ""
    axes = [_axes_text(entry)] if entry.axes else []
    return [size_text(entry.nbytes), str(len(entry.blocks)), files[0] + more if files else "", *axes]


def _axes_text(entry: TensorEntry) -> str:
    return ", ".join(axis or "-" for axis in entry.axes or ())


def _stats_cells(stats: Statistics) -> list[str]:
    """Mean, deviation, least, largest, NaNs, infinities."""
    numbers = (stats.mean, stats.std, stats.min, stats.max)
    return [*("" if n is None else _number_text(n) for n in numbers), str(stats.num_nan), str(stats.num_inf)]


def _number_text(number: int | float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.5g}"


def _show_tensor(entry: TensorEntry, with_stats: bool, picture: str | None, as_json: bool) -> None:
    if picture:
        check_drawing(picture)
    stats, histogram, drawn = None, None, None
    if with_stats or picture:
        passes = 1 + with_stats + (picture is not None)
        with shown_progress("reading", passes * entry.nbytes) as progress:
            stats = statistics_of(entry, progress)
            if with_stats:
                histogram = histogram_of(entry, stats, _BINS, progress)
            if picture:
                drawn = histogram_of(entry, stats, _PICTURE_BINS, progress)
    if picture and stats and drawn:
        draw_histogram(picture, entry, stats, drawn)
    if as_json:
        print_json({"name": entry.name, **_json(entry, stats, histogram)})
        return
    print(f"{printable(entry.name)}: {entry.dtype.name} {entry.shape}, {size_text(entry.nbytes)}")
    if entry.axes is not None:
        print(f"mesh axes: {_axes_text(entry)}")
    for file, box in entry.blocks:
        print(f"  {printable(file)}: {box}")
    if stats:
        names = ("mean", "std", "min", "max", "NaN", "infinite")
        print(", ".join(f"{name} {cell}" for name, cell in zip(names, _stats_cells(stats), strict=True) if cell))
    if histogram:
        _print_histogram(histogram)
    corner = Box(
        (0,) * len(entry.shape),
        tuple(min(n, _PREVIEW if i >= len(entry.shape) - 2 else 1) for i, n in enumerate(entry.shape)),
    )
    part = "" if corner.shape == entry.shape else f" {corner}"
    print(f"values{part}:\n{np.array2string(entry.read(corner), separator=', ')}")


def _print_histogram(histogram: Histogram) -> None:
    """Print a line for each bin: its begin, its count, and a bar; the last line is the end of the last bin."""
    edges = [f"{edge:.4g}" for edge in histogram.edges]
    counts = [str(count) for count in histogram.counts]
    most = max(histogram.counts, default=0)
    drawn = "\u2588" if can_print("\u2588") else "#"
    for edge, count, text in zip(edges, histogram.counts, counts, strict=False):
        bar = drawn * round(_BAR_WIDTH * count / most)
        print(f"  {edge:>{max(map(len, edges))}}  {text:>{max(map(len, counts))}} {bar}".rstrip())
    if edges:
        print(f"  {edges[-1]:>{max(map(len, edges))}}")


def _json(entry: TensorEntry, stats: Statistics | None = None, histogram: Histogram | None = None) -> dict[str, Any]:
    return {
        "dtype": entry.dtype.name,
        "shape": entry.shape,
        "bytes": entry.nbytes,
        "axes": entry.axes,
        "blocks": [{"file": file, "offset": box.offset, "shape": box.shape} for file, box in entry.blocks],
        **({"stats": stats._asdict()} if stats else {}),
        **({"histogram": histogram._asdict()} if histogram else {}),
    }
