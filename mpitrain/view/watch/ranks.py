"""The table of ranks: their last steps, and the last figures of their hardware."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from mpitrain.job.record.files.ranks import busy_s
from mpitrain.job.record.parsing.lines import Line

_LAST = 20
"""The figures of a rank are medians over so many steps."""
_NAMES = ("step_s", "busy_s", "wait_s", "delay_s", "memory_bytes")


class Rank(NamedTuple):
    """The figures of a rank by name: those of _NAMES, and of gauges."""

    number: int
    figures: Mapping[str, float | None]

    def get(self, name: str) -> float | None:
        return self.figures.get(name)


class RankFigures:
    """The last lines of ranks.jsonl."""

    def __init__(self) -> None:
        self._forget(0)

    def _forget(self, num_ranks: int) -> None:
        """Begin anew, with so many ranks."""
        self._num_ranks = num_ranks
        self._of_ranks: deque[Line] = deque(maxlen=_LAST)
        self._summaries: deque[Line] = deque(maxlen=_LAST)
        self._gauges: Mapping[str, Any] = {}
        self._all: list[Rank] = []  # until the next line

    def take(self, lines: Sequence[Line]) -> None:
        """Add lines. Those of another number of ranks are forgotten: a recovery has numbered the ranks anew."""
        lines = [line for line in lines if _num_ranks(line)]
        if not lines:
            return
        num = _num_ranks(lines[-1])
        of_others = [at for at, line in enumerate(lines) if _num_ranks(line) != num]
        if of_others or num != self._num_ranks:
            self._forget(num)
            lines = lines[of_others[-1] + 1 :] if of_others else lines
        self._all = []
        # Older ones could only push each other out. In long summaries every 100th line has all ranks.
        self._of_ranks.extend([line for line in lines if "ranks" in line][-_LAST:])
        self._summaries.extend([line for line in lines[-_LAST:] if "summary" in line])
        for line in reversed(lines):
            if "gauges" in line:
                self._gauges = line["gauges"]
                break

    @property
    def step(self) -> int | None:
        """The last step with the figures of all ranks."""
        return self._of_ranks[-1]["step"] if self._of_ranks else None

    @property
    def is_summarized(self) -> bool:
        """Whether most steps have only a summary of the ranks."""
        return bool(self._summaries)

    def all(self) -> list[Rank]:
        """All ranks, in order."""
        if not self._of_ranks:
            return []
        # With summaries one line is a step of its own: the line before it is 100 steps old.
        lines = [self._of_ranks[-1]] if self.is_summarized else list(self._of_ranks)
        if not self._all:
            self._all = [Rank(rank, self._figures(lines, rank)) for rank in range(self._num_ranks)]
        return self._all

    def _figures(self, lines: Sequence[Line], rank: int) -> dict[str, float | None]:
        each: dict[str, list[float]] = {name: [] for name in _NAMES}
        for line in lines:
            its = {name: values[rank] for name, values in line["ranks"].items() if rank < len(values)}
            step_s, comm_s, check_s = (its.get(name) or 0.0 for name in ("step_s", "comm_s", "check_s"))
            its |= {"wait_s": comm_s + check_s, "busy_s": busy_s(step_s, comm_s, check_s)}
            for name, values in each.items():
                if (value := its.get(name)) is not None:
                    values.append(value)
        figures: dict[str, float | None] = {name: statistics.median(values) for name, values in each.items() if values}
        for name, gauge in self._gauges.items():
            figures[name] = gauge[rank] if rank < len(gauge) else None
        return figures

    def summary(self, name: str) -> tuple[float, float, float, int] | None:
        """Minimum, median, maximum, and the worst rank of a figure, in the median over the last steps."""
        each_line = (line["summary"].get(name) for line in self._summaries)
        found = [each for each in each_line if each is not None and None not in each]
        if not found:
            return None
        low, middle, high = (statistics.median(each[at] for each in found) for at in range(3))
        return low, middle, high, int(statistics.mode(each[3] for each in found))


class Column(NamedTuple):
    """A column of the table."""

    title: str
    name: str
    scale: float
    form: str


COLUMNS = (
    Column("step ms", "step_s", 1e3, ".0f"),
    Column("busy ms", "busy_s", 1e3, ".0f"),
    Column("comm+wait ms", "wait_s", 1e3, ".0f"),
    Column("MB", "memory_bytes", 1e-6, ",.0f"),
    Column("GPU %", "gpu_percent", 1, ".0f"),
    Column("W", "gpu_watts", 1, ".0f"),
    Column("°C", "gpu_celsius", 1, ".0f"),
    Column("CPU %", "cpu_percent", 1, ".0f"),
    Column("no core ms", "delay_s", 1e3, ".1f"),
)
_SUMMARIES = (
    ("step", "step_s", 1e3, "ms"),
    ("comm+wait", "comm_s", 1e3, "ms"),
    ("memory", "memory_bytes", 1e-6, "MB"),
)


def table(ranks: RankFigures, hosts: Sequence[str], slow: Mapping[int, str], *, width: int, most: int) -> list[Text]:
    """The table in lines: at most `most` ranks, and as many columns as fit. If not all ranks fit, the busiest are shown.

    `hosts`: of each rank, may be empty. `slow`: the cause of each rank that train has named as slow.
    """
    rows = ranks.all()
    columns = [column for column in COLUMNS if any(rank.get(column.name) is not None for rank in rows)]
    shown = rows
    if len(rows) > most:
        worst = sorted(rows, key=lambda rank: (rank.number not in slow, -(rank.get("busy_s") or 0.0)))[
            : max(most - 1, 0)
        ]
        shown = sorted(worst, key=lambda rank: rank.number) if not ranks.is_summarized else worst
    names = [f"{rank.number}" + (f" {hosts[rank.number]}" if rank.number < len(hosts) else "") for rank in shown]
    cells = [names, *([_cell(rank, column) for rank in shown] for column in columns)]
    titles = ["rank", *(column.title for column in columns)]
    widths = [max(map(len, (title, *its))) for title, its in zip(titles, cells, strict=True)]
    remarks = [_remark(rank, slow) for rank in shown]
    room = width - max(map(len, remarks), default=0)
    while len(widths) > 1 and sum(widths) + 2 * (len(widths) - 1) > room:
        widths.pop()
    lines = [Text(_row(titles, widths), style="dim")]
    for at, remark in enumerate(remarks):
        lines.append(Text(_row([column[at] for column in cells], widths) + remark, style="yellow" if remark else ""))
    if len(shown) < len(rows):
        when = f" (of step {ranks.step:,})" if ranks.is_summarized else ""
        lines.append(Text(f"{len(rows) - len(shown):,} more ranks{when}, which are less busy", style="dim"))
    return lines


def _remark(rank: Rank, slow: Mapping[int, str]) -> str:
    cause = f"  slow: {slow[rank.number]}" if rank.number in slow else ""
    return cause + ("  throttled" if rank.get("gpu_throttled") else "")


def summary_lines(ranks: RankFigures) -> list[Text]:
    """The summaries of many ranks: a line for each figure."""
    lines = []
    for title, name, scale, unit in _SUMMARIES:
        if (found := ranks.summary(name)) is not None:
            low, middle, high = (f"{value * scale:,.0f}" for value in found[:3])
            lines.append(Text(f"{title} {low} to {high} {unit}, median {middle}, most on rank {found[3]}"))
    return lines


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = f"{cells[0]:<{widths[0]}}"
    return "  ".join([first, *(f"{cell:>{size}}" for cell, size in zip(cells[1:], widths[1:], strict=False))])


def _cell(rank: Rank, column: Column) -> str:
    value = rank.get(column.name)
    return "-" if value is None else f"{value * column.scale:{column.form}}"


def _num_ranks(line: Line) -> int:
    """0 in a line without figures of ranks."""
    return int(line.get("num_ranks", 0))
