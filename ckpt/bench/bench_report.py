"""Tables of one or several launches, and the goals. The module imports neither torch nor MPI.

A table of several launches has the median of each figure. A ratio is computed within each launch, because both sides had the same
disturbances there; the table has the median of these ratios.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ckpt.bench.results import BACKGROUND, DCP, LARGE, POSIX, TINY, CheckpointLaunch, ours
from collectives.bench.kit.launches import alike, median_known, median_ratio
from collectives.shared.tables import new_table, plural
from collectives.shared.units import show_seconds

ACTIONS = ("save", "load", "load unverified")
LEGEND = (
    "Seconds: slowest rank, median over the rounds; GB/s: of all ranks. Saves end with fsync, ours with checksums.\n"
    "at least: how many times as fast as the other side; at most: how many times its time."
)
Key = tuple[str, str]  # contestant and action


class Goal(NamedTuple):
    """The ratio of two times. `bound`: None shows the ratio without a goal."""

    what: str
    mine: Key
    other: Key
    bound: float | None
    at_least: bool = True

    def ratio(self, launches: Sequence[CheckpointLaunch]) -> float | None:
        """The median over the launches that have both times; None if there are none."""
        sides = (self.other, self.mine) if self.at_least else (self.mine, self.other)
        return median_ratio([launch.seconds() for launch in launches], *sides)

    def is_reached(self, ratio: float) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        if self.bound is None:
            return None
        return ratio >= self.bound if self.at_least else ratio <= self.bound


_RANK, _ONE = ours("rank"), ours("one")
GOALS = (
    Goal("save, a file per rank, against POSIX", (_RANK, "save"), (POSIX, "save"), 0.95),
    Goal("save, one file, against POSIX", (_ONE, "save"), (POSIX, "save"), 0.85),
    Goal("save, a file per rank, against DCP", (_RANK, "save"), (DCP, "save"), 1.5),
    Goal("load against POSIX", (_RANK, "load"), (POSIX, "load"), 0.6),
    Goal("load without verification against POSIX", (_RANK, "load unverified"), (POSIX, "load"), 0.85),
    Goal("load against DCP", (_RANK, "load"), (DCP, "load"), 1.2),
    Goal("in the background: blocked time, against a memcpy", (BACKGROUND, "pause"), (BACKGROUND, "copy"), 1.3, False),
    Goal("in the background: steps meanwhile, against without", (BACKGROUND, "step meanwhile"), (BACKGROUND, "step"), 1.1, False),
    Goal("save 2,000 tensors, against 8 of the same bytes", (TINY, "save"), (LARGE, "save"), 1.3, False),
    Goal("load 2,000 tensors, against 8 of the same bytes", (TINY, "load"), (LARGE, "load"), 1.3, False),
)  # fmt: skip


def goals(launches: Sequence[CheckpointLaunch]) -> list[Goal]:
    """The goals with measured times, and a line for each further layout and driver."""
    known = {POSIX, DCP, *(name for goal in GOALS for name, _ in (goal.mine, goal.other))}
    others = dict.fromkeys(row.contestant for launch in launches for row in launch.rows)
    more = [
        Goal(f"{action}, {name}, against POSIX", (name, action), (POSIX, action), None)
        for name in others
        if name not in known
        for action in ("save", "load")
    ]
    return [goal for goal in (*GOALS, *more) if goal.ratio(launches) is not None]


def seconds(launches: Sequence[CheckpointLaunch], key: Key) -> float | None:
    """The median over the launches that have this figure."""
    return median_known(launch.seconds().get(key) for launch in launches)


def heading(group: Sequence[CheckpointLaunch]) -> str:
    """One line with the machine, the state and the counts of a group of launches."""
    first = group[0]
    cache = "dropped from the page cache" if first.cold else "in the page cache"
    return (
        f"{first.ranks_on_nodes}, {first.machine.get('cpu', '?')}; {first.nbytes / 1e9:.3g} GB in {first.tensors} tensors; loads with "
        f"the files {cache}; {plural(len(group), 'launch')} of {plural(first.rounds, 'round')}"
    )


def tables(launches: Sequence[CheckpointLaunch]) -> Iterator[RenderableType]:
    """The tables and lines to print; launches of one kind share a table."""
    for group in alike(launches):
        yield Text(heading(group), style="bold")
        yield _times(group)
        yield _goals(group)
        skipped = {name: why for launch in group for name, why in launch.skipped.items()}
        yield from (Text(f"  skipped {name}: {reason}") for name, reason in skipped.items())
    yield Text(LEGEND, style="dim")


def _times(group: Sequence[CheckpointLaunch]) -> Table:
    table = new_table(("", *(heading for action in ACTIONS for heading in (f"{action} s", "GB/s"))))
    for name in dict.fromkeys(row.contestant for launch in group for row in launch.rows):
        cells = []
        for action in ACTIONS:
            value = seconds(group, (name, action))
            cells += ["", ""] if value is None else [f"{value:.3f}", f"{group[0].nbytes / value / 1e9:.2f}"]
        table.add_row(name, *cells)
    return table


def _goals(group: Sequence[CheckpointLaunch]) -> Table:
    table = new_table(("", "ours", "other", "ratio", "to reach", ""))
    for goal in goals(group):
        ratio = goal.ratio(group)
        mine_s, other_s = seconds(group, goal.mine), seconds(group, goal.other)
        assert ratio is not None and mine_s is not None and other_s is not None
        reached = {True: Text("reached", "green"), False: Text("missed", "red"), None: Text()}[goal.is_reached(ratio)]
        wanted = "" if goal.bound is None else f"at {'least' if goal.at_least else 'most'} {goal.bound:g}x"
        table.add_row(goal.what, show_seconds(mine_s), show_seconds(other_s), f"{ratio:.2f}x", wanted, reached)
    return table
