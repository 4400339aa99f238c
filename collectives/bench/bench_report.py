"""The report on several launches: for each figure the median over the launches, and the ratios of the peers to "auto".

A ratio is computed within each launch, in which both sides had the same disturbances; the tables show the median of these ratios.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from rich.table import Table

from collectives.bench.kit.launches import alike, median_ratio
from collectives.bench.results import GLOO, RAW, CallOverhead, CollectivesLaunch, Measurement
from collectives.shared.tables import markdown_table, new_table, plural
from collectives.texts import show_bytes

HEADINGS = ("size", "auto µs", "busbw GB/s", "MPI / auto", "Gloo / auto", "best fixed", "auto / best")
LEGEND = (
    "MPI / auto, Gloo / auto: time of plain mpi4py, and of torch's Gloo, divided by the time of auto, on private memory; "
    "auto / best: time of auto divided by the time of the best fixed algorithm. Medians over the launches."
)


Key = tuple[str, str]  # algorithm (or a peer's name) and memory


class Section(NamedTuple):
    """A table: its title, the headings, and the rows as text."""

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


def lines(launches: Sequence[CollectivesLaunch], operation: str, dtype: str, memory: str) -> list[tuple[str, ...]]:
    """The cells under HEADINGS for each size at which "auto" was measured in `memory`."""
    by_size: dict[int, list[dict[Key, Measurement]]] = {}
    for i, launch in enumerate(launches):
        for row in launch.results:
            if (row.operation, row.dtype) == (operation, dtype):
                at = by_size.setdefault(row.nbytes, [{} for _ in launches])
                at[i][row.algorithm, row.memory] = row
    return [
        _line(nbytes, at, memory) for nbytes, at in sorted(by_size.items()) if any(("auto", memory) in of for of in at)
    ]


def _line(nbytes: int, at: Sequence[dict[Key, Measurement]], memory: str) -> tuple[str, ...]:
    auto = ("auto", memory)
    seconds = [{key: row.seconds for key, row in group.items()} for group in at]
    fixed = {
        name: median(group[name, memory] for group in seconds if (name, memory) in group)
        for name, where in dict.fromkeys(key for group in at for key in group)
        if where == memory and name not in ("auto", RAW, GLOO)
    }
    best = min(fixed, key=lambda name: fixed[name], default="")

    def times(one: Key, other: Key) -> str:
        ratio = median_ratio(seconds, one, other)
        return "" if ratio is None else f"{ratio:.2f}x"

    return (
        show_bytes(nbytes),
        f"{median(group[auto] for group in seconds if auto in group) * 1e6:.1f}",
        f"{median(group[auto].busbw for group in at if auto in group) / 1e9:.3f}",
        times((RAW, "private"), auto),
        times((GLOO, "private"), auto),
        best,
        times(auto, (best, memory)),
    )


def sections(launches: Sequence[CollectivesLaunch]) -> Iterator[Section]:
    """The tables of launches that can be compared (see `alike`)."""
    rows = (row for launch in launches for row in launch.results if row.algorithm == "auto")
    for operation, dtype, memory in dict.fromkeys((row.operation, row.dtype, row.memory) for row in rows):
        where = memory if memory == "in place" else f"{memory} memory"
        title = f"{operation}, {dtype}, {where}, {_on(launches)}"
        yield Section(title, HEADINGS, lines(launches, operation, dtype, memory))
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
    headings = ("operation, size, arrays, algorithm", "collectives µs", "raw mpi4py µs", "difference µs")
    return Section(f"Python time per call, {_on(launches)}", headings, rows)


def _on(launches: Sequence[CollectivesLaunch]) -> str:
    return f"{launches[0].ranks_on_nodes}, {plural(len(launches), 'launch')}"


def heading(launch: CollectivesLaunch) -> str:
    """The machine of a group of launches, in one line."""
    cpu, cores, mpi = (launch.machine.get(name, "?") for name in ("cpu", "cores", "mpi"))
    return f"{launch.ranks_on_nodes}; {cpu}, {cores} cores per node; {mpi}; {launch.arrays} arrays"


def markdown(launches: Sequence[CollectivesLaunch]) -> str:
    """All tables as Markdown."""
    parts = []
    for group in alike(launches):
        parts.append(f"## {heading(group[0])}\n")
        parts += [section.markdown() for section in sections(group)]
    return "\n".join((LEGEND + "\n", *parts))
