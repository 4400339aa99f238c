"""What a launch has measured, and the JSON file. Pure: neither torch nor MPI."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from collectives.bench.records import Record

# Names of contestants.
POSIX, DCP, BACKGROUND = "POSIX", "DCP", "ckpt in the background"
TINY, LARGE = "ckpt, 2,000 tensors", "ckpt, 8 tensors"


def ours(files: str | int, driver: str = "posix") -> str:
    """The name of `ckpt` in a layout, by a driver."""
    return f"ckpt {files}" if driver == "posix" else f"ckpt {files}, {driver}"


@dataclass(frozen=True)
class Row:
    """What one contestant took for one thing."""

    contestant: str
    action: str
    """save, load, load unverified; of the one in the background: copy (memory to memory), pause (the caller stands still), save (until
    it is done), step, step meanwhile (the mean of the steps)."""
    seconds: float
    """Median over the rounds of the slowest rank's."""
    fastest_s: float
    slowest_s: float


@dataclass(frozen=True)
class Launch(Record):
    """All that one job has measured, and on what."""

    FORMAT = 1
    COMMAND = "python -m ckpt bench --json"

    machine: dict[str, Any]  # see Communicator.machine
    ranks: int
    nodes: int
    nbytes: int
    """What each contestant saves and loads, of all ranks."""
    tensors: int
    rounds: int
    cold: bool
    """Whether the files were dropped from the page cache before each load."""
    rows: Sequence[Row] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Who did not take part, and why."""

    def seconds(self, contestant: str, action: str) -> float | None:
        """The median, or None if that was not measured."""
        found = (row.seconds for row in self.rows if (row.contestant, row.action) == (contestant, action))
        return next(found, None)
