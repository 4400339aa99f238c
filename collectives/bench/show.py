"""Measurements as a table for a terminal."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from collectives.bench.results import RAW, Launch, Measurement, Skipped
from collectives.bench.units import show_bytes


def tables(launch: Launch) -> Iterator[RenderableType]:
    """A table for each operation and dtype, the fastest on private memory in bold; then who was skipped and why."""
    everyone: Sequence[Measurement | Skipped] = (*launch.results, *launch.skipped)
    cases = dict.fromkeys((row.operation, row.dtype) for row in everyone)
    for case in cases:
        group = [row for row in launch.results if (row.operation, row.dtype) == case]
        if group:
            yield _table(launch, *case, group)
        reasons = dict.fromkeys(
            (row.algorithm, row.memory, row.reason) for row in launch.skipped if (row.operation, row.dtype) == case
        )
        for algorithm, memory, reason in reasons:
            yield Text(f"  {case[0]}, {case[1]}: skipped {algorithm} on {memory} memory: {reason}")
    if launch.overhead:
        yield _overhead(launch)


def ranks_on(launch: Launch) -> str:
    """'2 ranks on 1 node'."""
    return f"{launch.ranks} ranks on {launch.nodes} node{'s' * (launch.nodes > 1)}"


def _table(launch: Launch, operation: str, dtype: str, group: list[Measurement]) -> Table:
    shown = Table(title=f"{operation}, {dtype}, {ranks_on(launch)}", caption="algbw, busbw: GB/s", box=box.SIMPLE_HEAD)
    for name in ("size", "algorithm", "memory"):
        shown.add_column(name, no_wrap=True)
    for name in ("µs", "algbw", "busbw", "of raw"):
        shown.add_column(name, justify="right", no_wrap=True)
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


def _overhead(launch: Launch) -> Table:
    shown = Table(title=f"Python's time a call over raw mpi4py, {ranks_on(launch)}", box=box.SIMPLE_HEAD)
    for name in ("operation", "size", "arrays", "algorithm"):
        shown.add_column(name, no_wrap=True)
    for name in ("ours µs", "raw µs", "over raw µs"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in launch.overhead:
        figures = (row.seconds, row.raw_seconds, row.seconds - row.raw_seconds)
        shown.add_row(
            row.operation,
            show_bytes(row.nbytes),
            row.arrays,
            row.algorithm,
            *(f"{seconds * 1e6:.2f}" for seconds in figures),
        )
    return shown
