"""Several launches together: for each figure the median over the launches, and how "auto" does against its peers.

A ratio is formed within each launch, where both sides met the same disturbances; shown is the median of these ratios. Pure: no MPI.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from rich.table import Table

from collectives.bench.kit.launches import alike, median_ratio
from collectives.bench.kit.tables import markdown_table, new_table, plural
from collectives.bench.results import GLOO, RAW, CallOverhead, CollectivesLaunch
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
        shown = new_table(self.headings, title=self.title)
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def markdown(self) -> str:
        return f"### {self.title}\n\n{markdown_table(self.headings, self.rows)}"


def lines(launches: Sequence[CollectivesLaunch], operation: str, dtype: str, memory: str) -> list[Line]:
    """A line for each size at which "auto" was measured in that memory."""
    rows = [row for launch in launches for row in launch.results if (row.operation, row.dtype) == (operation, dtype)]
    sizes = sorted({row.nbytes for row in rows if (row.algorithm, row.memory) == ("auto", memory)})
    return [_line(launches, operation, dtype, memory, nbytes) for nbytes in sizes]


def _line(launches: Sequence[CollectivesLaunch], operation: str, dtype: str, memory: str, nbytes: int) -> Line:
    case = (operation, dtype, nbytes)
    at = [
        {(row.algorithm, row.memory): row for row in launch.results if (row.operation, row.dtype, row.nbytes) == case}
        for launch in launches
    ]
    seconds = [{key: row.seconds for key, row in group.items()} for group in at]
    auto = ("auto", memory)
    fixed = {
        name: median(group[name, memory] for group in seconds if (name, memory) in group)
        for name, where in dict.fromkeys(key for group in at for key in group)
        if where == memory and name not in ("auto", RAW, GLOO)
    }
    best = min(fixed, key=lambda name: fixed[name]) if fixed else None
    to_best = None if best is None else median_ratio(seconds, (best, memory), auto)
    return Line(
        nbytes,
        median(group[auto] for group in seconds if auto in group),
        median(group[auto].busbw for group in at if auto in group),
        median_ratio(seconds, (RAW, "private"), auto),
        median_ratio(seconds, (GLOO, "private"), auto),
        best,
        None if to_best is None else 1 / to_best,
    )


def sections(launches: Sequence[CollectivesLaunch]) -> Iterator[Section]:
    """The tables of launches that can be put together (see `alike`)."""
    rows = (row for launch in launches for row in launch.results if row.algorithm == "auto")
    for operation, dtype, memory in dict.fromkeys((row.operation, row.dtype, row.memory) for row in rows):
        where = memory if memory == "in place" else f"{memory} memory"
        shown = [_shown(line) for line in lines(launches, operation, dtype, memory)]
        yield Section(f"{operation}, {dtype}, {where}, {_on(launches)}", HEADINGS, shown)
    if any(launch.overhead for launch in launches):
        yield overhead(launches)


def overhead(launches: Sequence[CollectivesLaunch]) -> Section:
    """The medians over the launches of each measured overhead."""
    calls: dict[str, list[CallOverhead]] = {}
    for row in (row for launch in launches for row in launch.overhead):
        calls.setdefault(f"{row.operation}, {show_bytes(row.nbytes)}, {row.arrays}, {row.algorithm}", []).append(row)
    rows: list[tuple[str, ...]] = []
    for call, group in calls.items():
        sides = ([row.seconds for row in group], [row.raw_seconds for row in group])
        seconds = (*map(median, sides), median(ours - raw for ours, raw in zip(*sides, strict=True)))
        rows.append((call, *(f"{figure * 1e6:.2f}" for figure in seconds)))
    headings = ("call", "ours µs", "raw mpi4py µs", "over raw µs")
    return Section(f"Python's time a call over raw mpi4py, {_on(launches)}", headings, rows)


def _on(launches: Sequence[CollectivesLaunch]) -> str:
    return f"{launches[0].ranks_on_nodes}, {plural(len(launches), 'launch')}"


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


def heading(launch: CollectivesLaunch) -> str:
    """What a group was measured on, in a line."""
    cpu, cores, mpi = (launch.machine.get(name, "?") for name in ("cpu", "cores", "mpi"))
    return f"{launch.ranks_on_nodes} of {cpu}, {cores} cores each; {mpi}; {launch.arrays} arrays"


def markdown(launches: Sequence[CollectivesLaunch]) -> str:
    """All tables as Markdown, to put into a document."""
    parts = []
    for group in alike(launches):
        parts.append(f"## {heading(group[0])}\n")
        parts += [section.markdown() for section in sections(group)]
    return "\n".join((LEGEND + "\n", *parts))
