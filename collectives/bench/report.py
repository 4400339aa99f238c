"""Several launches together: for each figure the median over the launches, and how "auto" does against its peers.

A ratio is formed within each launch, where both sides met the same disturbances; shown is the median of these ratios. Pure: no MPI.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from rich import box
from rich.table import Table

from collectives.bench.records import alike
from collectives.bench.results import GLOO, RAW, Launch, Measurement
from collectives.bench.show import ranks_on
from collectives.bench.units import show_bytes

HEADINGS = ("size", "auto µs", "busbw GB/s", "MPI / auto", "Gloo / auto", "best fixed", "auto / best")
LEGEND = (
    "MPI / auto, Gloo / auto: how many times as fast auto is as plain mpi4py, and as torch's Gloo, on private memory; "
    "auto / best: its time against that of the best fixed algorithm. Medians over the launches."
)


class Line(NamedTuple):
    """One size. `seconds`, `busbw`: of "auto". None: that contestant did not take part."""

    nbytes: int
    seconds: float
    busbw: float
    mpi_over_auto: float | None
    gloo_over_auto: float | None
    best: str | None
    auto_over_best: float | None


class Section(NamedTuple):
    """A table: its title, the headings, and the rows as they are shown."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def rich(self) -> Table:
        shown = Table(title=self.title, box=box.SIMPLE_HEAD)
        for i, heading in enumerate(self.headings):
            shown.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def markdown(self) -> str:
        lines = [self.headings, ("---", *["---:"] * (len(self.headings) - 1)), *self.rows]
        return f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def lines(launches: Sequence[Launch], operation: str, dtype: str, memory: str) -> list[Line]:
    """A line for each size at which "auto" was measured in that memory."""
    rows = [[row for row in launch.results if (row.operation, row.dtype) == (operation, dtype)] for launch in launches]
    sizes = sorted({row.nbytes for group in rows for row in group if (row.algorithm, row.memory) == ("auto", memory)})
    found = []
    for nbytes in sizes:
        at = [{(row.algorithm, row.memory): row for row in group if row.nbytes == nbytes} for group in rows]
        auto = [group["auto", memory] for group in at if ("auto", memory) in group]
        fixed = {
            name: median(group[name, memory].seconds for group in at if (name, memory) in group)
            for name, where in dict.fromkeys(key for group in at for key in group)
            if where == memory and name not in ("auto", RAW, GLOO)
        }
        best = min(fixed, key=lambda name: fixed[name]) if fixed else None
        to_best = None if best is None else _ratio(at, (best, memory), ("auto", memory))
        found.append(
            Line(
                nbytes,
                median(row.seconds for row in auto),
                median(row.busbw for row in auto),
                _ratio(at, (RAW, "private"), ("auto", memory)),
                _ratio(at, (GLOO, "private"), ("auto", memory)),
                best,
                None if to_best is None else 1 / to_best,
            )
        )
    return found


def _ratio(
    at: Sequence[dict[tuple[str, str], Measurement]], one: tuple[str, str], other: tuple[str, str]
) -> float | None:
    """The median over the launches of the first one's time over the other's; None if no launch has both."""
    ratios = [group[one].seconds / group[other].seconds for group in at if one in group and other in group]
    return median(ratios) if ratios else None


def sections(launches: Sequence[Launch]) -> Iterator[Section]:
    """The tables of launches of one kind (see `groups`)."""
    first = launches[0]
    cases = dict.fromkeys(
        (row.operation, row.dtype, row.memory)
        for launch in launches
        for row in launch.results
        if row.algorithm == "auto"
    )
    for operation, dtype, memory in cases:
        where = memory if memory == "in place" else f"{memory} memory"
        title = f"{operation}, {dtype}, {where}, {ranks_on(first)}, {_launches(launches)}"
        yield Section(title, HEADINGS, [_shown(line) for line in lines(launches, operation, dtype, memory)])
    rows = overhead_rows(launches)
    if rows:
        headings = ("call", "ours µs", "raw mpi4py µs", "over raw µs")
        yield Section(f"Python's time a call, {ranks_on(first)}, {_launches(launches)}", headings, rows)


def overhead_rows(launches: Sequence[Launch]) -> list[tuple[str, ...]]:
    """The medians over the launches of each measured overhead."""
    rows = [row for launch in launches for row in launch.overhead]
    shown = []
    for key in dict.fromkeys(replace(row, seconds=0.0, raw_seconds=0.0) for row in rows):
        group = [row for row in rows if replace(row, seconds=0.0, raw_seconds=0.0) == key]
        figures = (
            median(row.seconds for row in group),
            median(row.raw_seconds for row in group),
            median(row.seconds - row.raw_seconds for row in group),
        )
        name = f"{key.operation}, {show_bytes(key.nbytes)}, {key.arrays}, {key.algorithm}"
        shown.append((name, *(f"{seconds * 1e6:.2f}" for seconds in figures)))
    return shown


def _launches(launches: Sequence[Launch]) -> str:
    return f"{len(launches)} launch{'es' * (len(launches) > 1)}"


def _shown(line: Line) -> tuple[str, ...]:
    def times(ratio: float | None) -> str:
        return "" if ratio is None else f"{ratio:.2f}x"

    return (
        show_bytes(line.nbytes),
        f"{line.seconds * 1e6:.1f}",
        f"{line.busbw / 1e9:.3f}",
        times(line.mpi_over_auto),
        times(line.gloo_over_auto),
        line.best or "",
        times(line.auto_over_best),
    )


def groups(launches: Sequence[Launch]) -> list[list[Launch]]:
    """The launches that can be compared: on the same machine, number of ranks and of nodes, and kind of arrays."""
    return alike(launches, "machine", "ranks", "nodes", "arrays")


def heading(launch: Launch) -> str:
    """What a group was measured on, in a line."""
    cpu, cores, mpi = (launch.machine.get(name, "?") for name in ("cpu", "cores", "mpi"))
    return f"{ranks_on(launch)} of {cpu}, {cores} cores each; {mpi}; {launch.arrays} arrays"


def markdown(launches: Sequence[Launch]) -> str:
    """All tables as Markdown, to put into a document."""
    parts = []
    for group in groups(launches):
        parts.append(f"## {heading(group[0])}\n")
        parts += [section.markdown() for section in sections(group)]
    return "\n".join((LEGEND + "\n", *parts))
