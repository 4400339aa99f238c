"""The commands that show a run, on records of several sizes: the time of the whole command, and the size of the page."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.monitoring.recorded_runs import write_run
from collectives.programs import python

SIZES = ((2, 60), (2, 20_000), (2, 200_000), (1024, 20_000))
"""Ranks and steps."""


class Shown(NamedTuple):
    """The medians of one record."""

    ranks: int
    steps: int
    report_s: float
    report_bytes: int
    watch_s: float


def measured(room: Path, *, rounds: int, sizes: Sequence[tuple[int, int]] = SIZES) -> Iterator[Shown]:
    """The commands on a record of each size, in turn."""
    for ranks, steps in sizes:
        folder = write_run(room / f"{ranks}-{steps}", steps=steps, ranks=ranks, save_every=max(steps // 20, 1))
        page = room / f"{ranks}-{steps}.html"
        report, watch = [], []
        for _ in range(rounds):
            report.append(_seconds("report", str(folder), "--out", str(page)))
            watch.append(_seconds("watch", str(folder), "--once"))
        yield Shown(ranks, steps, median(report), page.stat().st_size, median(watch))


def _seconds(*words: str) -> float:
    began = time.perf_counter()
    subprocess.run([*python("mpitrain"), *words], check=True, stdout=subprocess.DEVNULL, timeout=300)
    return time.perf_counter() - began
