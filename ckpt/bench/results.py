"""The figures of a launch, and the JSON file. Pure: neither torch nor MPI."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from collectives.bench.kit.launches import Launch

# Names of contestants.
POSIX, DCP, BACKGROUND = "POSIX", "DCP", "ckpt in the background"
TINY, LARGE = "ckpt, 2,000 tensors", "ckpt, 8 tensors"


def ours(files: str | int, driver: str = "posix") -> str:
    """The name of `ckpt` in a layout, by a driver."""
    return f"ckpt {files}" if driver == "posix" else f"ckpt {files}, {driver}"


@dataclass(frozen=True)
class ActionRow:
    """The time of one contestant for one action."""

    contestant: str
    action: str
    """save, load, load unverified; of the one in the background: copy (memory to memory), pause (the caller stands still), save (until
    it is done), step, step meanwhile (the mean of the steps)."""
    seconds: float
    """Median over the rounds of the slowest rank's."""
    fastest_s: float
    slowest_s: float


@dataclass(frozen=True)
class CheckpointLaunch(Launch):
    """The figures of one job."""

    FORMAT = 1
    COMMAND = "python -m ckpt bench --json"
    ALIKE = ("machine", "ranks", "nodes", "nbytes", "tensors", "cold")

    nbytes: int
    """The bytes that each contestant saves and loads, of all ranks."""
    tensors: int
    rounds: int
    cold: bool
    """Whether the files were dropped from the page cache before each load."""
    rows: Sequence[ActionRow] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    """The contestants that did not take part, and why."""

    def seconds(self) -> dict[tuple[str, str], float]:
        """The medians, by contestant and action."""
        return {(row.contestant, row.action): row.seconds for row in self.rows}
