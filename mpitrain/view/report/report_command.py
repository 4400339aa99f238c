"""`python -m mpitrain report RUN [RUN ...]`: see USAGE."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from collectives.shared.pictures import need_matplotlib
from collectives.texts import shown
from mpitrain.files import replace
from mpitrain.view.picture import writing
from mpitrain.view.reading.run import read_run
from mpitrain.view.report.document import make_document
from mpitrain.view.report.of_ranks import panels_of_layers, panels_of_ranks
from mpitrain.view.report.of_steps import charts_of_steps
from mpitrain.view.report.time_axis import TimeAxis


def main(words: Sequence[str]) -> int:
    """Write the page, and the pictures if asked; returns the exit code. ValueError or OSError for what cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain report",
        description="Make a page of one or more runs: an HTML file that needs no other file and no network. A run may be under way.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run; several are compared")
    parser.add_argument(
        "--out", metavar="FILE", help="the page (default: RUN/report.html; of several runs ./report.html)"
    )
    parser.add_argument(
        "--png",
        metavar="DIR",
        help="also write the charts as PNG pictures for papers into this folder (needs matplotlib)",
    )
    options = parser.parse_args(words)
    if options.png is not None:
        need_matplotlib("--png")
    runs = [read_run(folder) for folder in options.runs]
    png = None if options.png is None else Path(options.png)
    if png is not None:
        with writing("--png", png, is_folder=True):
            png.mkdir(parents=True, exist_ok=True)
    axes = [TimeAxis(run) for run in runs]
    charts = charts_of_steps(runs, axes)
    panels = [*panels_of_ranks(runs, axes), *panels_of_layers(runs, axes)]
    out = Path(options.out or (runs[0].folder / "report.html" if len(runs) == 1 else "report.html"))
    page = make_document(runs, axes, charts, panels, out.parent).encode()
    with writing("--out", out):
        _write(out, page)
    for run in runs:
        for note in run.notes:
            print(f"{run.name}: {note}")
    print(f"{shown(str(out))}: {len(page) / 1e6:.2f} MB")
    if png is not None:
        from mpitrain.view.report.pictures import draw

        with writing("--png", png, is_folder=True):
            files = draw(png, runs, charts, panels)
        print(f"{shown(str(png))}: {len(files)} pictures")
    return 0


def _write(path: Path, content: bytes) -> None:
    """Replace the file in one step: a browser may be loading it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, content)
