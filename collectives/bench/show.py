"""Measurements as a table for a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from collectives.bench.bench_report import overhead
from collectives.bench.results import RAW, CollectivesLaunch, Measurement, Skipped
from collectives.shared.tables import new_table
from collectives.texts import show_bytes


def tables(launches: Sequence[CollectivesLaunch]) -> Iterator[RenderableType]:
    """For each launch, operation and dtype a table, with the fastest time on private memory in bold; then the skipped contestants."""
    for launch in launches:
        everyone: Sequence[Measurement | Skipped] = (*launch.results, *launch.skipped)
        for case in dict.fromkeys((row.operation, row.dtype) for row in everyone):
            operation, dtype = case
            group = [row for row in launch.results if (row.operation, row.dtype) == case]
            if group:
                yield _table(f"{operation}, {dtype}, {launch.ranks_on_nodes}", group)
            skipped = (row for row in launch.skipped if (row.operation, row.dtype) == case)
            for name, memory, reason in dict.fromkeys((row.algorithm, row.memory, row.reason) for row in skipped):
                yield Text(f"  {operation}, {dtype}: skipped {name} on {memory} memory: {reason}")
        if launch.overhead:
            yield overhead([launch]).rich()


def _table(title: str, group: Sequence[Measurement]) -> Table:
    headings = ("size", "algorithm", "memory", "µs", "algbw", "busbw", "of raw")
    shown = new_table(headings, title=title, left=3, caption="algbw, busbw: GB/s")
    for nbytes in dict.fromkeys(row.nbytes for row in group):
        rows = [row for row in group if row.nbytes == nbytes]
        fastest = min((row.seconds for row in rows if row.memory == "private"), default=0)
        raw = next((row.seconds for row in rows if row.algorithm == RAW), None)
        for i, row in enumerate(rows):
            shown.add_row(
                show_bytes(nbytes) if i == 0 else "",
                row.algorithm,
                row.memory,
                f"{row.seconds * 1e6:.1f}",
                f"{row.algbw / 1e9:.3f}",
                f"{row.busbw / 1e9:.3f}",
                f"{raw / row.seconds:.2f}x" if raw else "",
                style="bold" if row.seconds == fastest else "",
            )
        shown.add_section()
    return shown
