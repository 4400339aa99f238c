"""Tables of one or several launches. The module imports neither torch nor MPI.

A table of several launches has the median of each figure. A ratio is computed within each launch, because both sides had the same
disturbances there; the table has the median of these ratios. Times come from launches with several contestants if there are any,
memory from launches with one contestant.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from collectives.bench.kit.launches import alike, median_known, median_ratio
from collectives.shared.tables import new_table, plural
from mpitrain.tools.bench.options import OURS, PEERS, PIPELINES, SEQUENCE, TENSOR
from mpitrain.tools.bench.results import BenchCase, HookOverhead, Phases, StepRow, TrainingLaunch

PHASES = {
    "forward": "forward_s", "backward": "backward_s", "comm": "comm_s", "optimizer": "optimizer_s", "other": "other_s",
}  # fmt: skip
LEGEND = (
    "step: slowest rank, median of the steps; forward ... other, in ms: mean of the ranks. comm: communication and waiting; if "
    "blank,\nit is part of forward and backward. state: parameters, gradients, optimizer; state and peaks: MB, largest rank."
)
LEGEND_OF_PIPELINES = (
    "forward of a pipeline: forwards and backwards; planned: the same by its schedule and the times of its actions."
)


def cases(launches: Sequence[TrainingLaunch]) -> list[BenchCase]:
    """All measured cases, each once."""
    return list(dict.fromkeys(part.case for launch in launches for part in launch.measured))


def merged(launches: Sequence[TrainingLaunch], case: BenchCase) -> list[StepRow]:
    """A row for each contestant: ours first, then in the order of PEERS."""
    everything = [list(part.rows) for launch in launches for part in launch.measured if part.case == case]
    names = list(dict.fromkeys(row.name for rows in everything for row in rows))
    order = [name for name in (OURS, *PEERS) if name in names]
    return [_median_row(everything, name) for name in (*order, *(name for name in names if name not in order))]


def ratio(launches: Sequence[TrainingLaunch], case: BenchCase, name: str, ours: str = OURS) -> float | None:
    """The median over the launches of the ratio of the step's time of `ours` to that of `name`; None if no launch has both."""
    measured = (part for launch in launches for part in launch.measured if part.case == case)
    return median_ratio([{row.name: row.step_s for row in part.rows} for part in measured], ours, name)


def _median_row(everything: Sequence[Sequence[StepRow]], name: str) -> StepRow:
    every = [row for rows in everything for row in rows if row.name == name]
    common = [row for rows in everything for row in rows if row.name == name and len(rows) > 1] or every
    times = {of: _median(common, of) for of in ("step_s", "planned_s", "tokens_per_s", "mfu", "loss")}
    bytes_ = {item.name: _median(every, item.name) for item in fields(StepRow) if "_bytes" in item.name}
    phases = {item.name: _median([row.phases for row in common], item.name) for item in fields(Phases)}
    merged: dict[str, Any] = times | {of: None if value is None else int(value) for of, value in bytes_.items()}
    return replace(
        common[0],
        fastest_s=min(row.fastest_s for row in common),
        slowest_s=max(row.slowest_s for row in common),
        phases=Phases(**phases),  # type: ignore[arg-type]
        **merged,
    )


def _median(rows: Sequence[Any], name: str) -> float | None:
    return median_known(getattr(row, name) for row in rows)


def tables(launches: Sequence[TrainingLaunch]) -> Iterator[RenderableType]:
    """The output for launches; launches of one kind share a table."""
    for group in alike(launches):
        yield Text(heading(group), style="bold")
        for case in cases(group):
            yield _table(group, case)
            skipped = {name: why for launch in group for part in launch.measured for name, why in part.skipped.items()}
            yield from (Text(f"  skipped {name}: {reason}") for name, reason in skipped.items())
        if any(launch.measured for launch in group):
            yield Text(LEGEND, style="dim")
        if any(row.planned_s is not None for launch in group for part in launch.measured for row in part.rows):
            yield Text(LEGEND_OF_PIPELINES, style="dim")
        found = [launch.overhead for launch in group if launch.overhead is not None]
        if found:
            yield Text(overhead_line(found))


def heading(group: Sequence[TrainingLaunch]) -> str:
    """One line with the machine and the ranks of a group."""
    first = group[0]
    where = first.machine.get("cpu", "?") if first.device == "cpu" else first.device
    ranks = f"{plural(first.ranks, 'rank')} x {plural(first.threads, 'thread')}"
    return f"{ranks} on {plural(first.nodes, 'node')}, {where}, {first.dtype}"


def overhead_line(found: Sequence[HookOverhead]) -> str:
    """One line with the medians of the ratios over the launches."""
    units = found[0].units
    passes = median(one.sharded_s / one.plain_s for one in found)
    whole = median(one.sharded_step_s / one.plain_step_s for one in found)
    a_unit = median((one.sharded_s - one.plain_s) / one.units for one in found)
    return (
        f"hooks and bookkeeping of {units} units on one rank: forward and backward {passes:.2f} times the plain model's "
        f"({a_unit * 1e6:.0f} us more a unit), the whole step {whole:.2f} times"
    )


def _table(group: Sequence[TrainingLaunch], case: BenchCase) -> Table:
    rows = merged(group, case)
    together = [part for launch in group for part in launch.measured if part.case == case and len(part.rows) > 1]
    title = f"{case}, medians of {len(together)} launches" if len(together) > 1 else str(case)
    columns: list[tuple[str, Callable[[StepRow], str]]] = [
        ("", lambda row: row.name),
        ("step ms", lambda row: _ms(row.step_s)),
        ("fastest .. slowest", lambda row: f"{_ms(row.fastest_s)} .. {_ms(row.slowest_s)}"),
        *(
            (f"{ours} / this", lambda row, ours=ours: _shown(ratio(group, case, row.name, ours), 1, ".2f"))
            for ours in (OURS, TENSOR, SEQUENCE, *PIPELINES)
        ),
        *((name, lambda row, of=of: _ms(getattr(row.phases, of))) for name, of in PHASES.items()),
        ("planned", lambda row: _ms(row.planned_s)),
        ("tokens/s", lambda row: f"{row.tokens_per_s:,.0f}"),
        ("MFU", lambda row: f"{row.mfu:.0%}"),
        ("state MB", lambda row: _megabytes(row.state_bytes)),
        ("peak RSS", lambda row: _megabytes(row.peak_rss_bytes)),
        ("peak PSS", lambda row: _megabytes(row.peak_pss_bytes)),
        ("PSS added", lambda row: _megabytes(row.added_pss_bytes)),
        ("peak GPU", lambda row: _megabytes(row.peak_gpu_bytes)),
    ]
    shown = {name: [show(row) for row in rows] for name, show in columns}
    shown = {name: cells for name, cells in shown.items() if any(cells)}
    table = new_table(list(shown), title=title)
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*cells)
    return table


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _megabytes(count: int | None) -> str:
    return _shown(count, 1e-6, ",.0f" if count is None or count >= 1e7 else ",.1f")


def _shown(value: float | None, factor: float, style: str) -> str:
    return "" if value is None else format(value * factor, style)
