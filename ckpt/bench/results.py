"""The figures of a launch, and the JSON file. The module imports neither torch nor MPI."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from collectives.bench.kit.launches import Launch

# Names of contestants.
POSIX, DCP, BACKGROUND = "POSIX", "DCP", "ckpt in the background"
TINY, LARGE = "ckpt, 2,000 tensors", "ckpt, 8 tensors"


def ours(files: str | int, driver: str = "posix") -> str:
    """The name of the contestant `ckpt` with a layout and a driver."""
    return f"ckpt {files}" if driver == "posix" else f"ckpt {files}, {driver}"


@dataclass(frozen=True)
class ActionRow:
    """The time of one contestant for one action."""

    contestant: str
    action: str
    """save, load, load unverified; for background saves: copy (memory to memory), pause (the caller is blocked), save (to its end),
    step, step meanwhile (the mean of the steps during the save)."""
    seconds: float
    """Time of the slowest rank, median over the rounds."""
    fastest_s: float
    slowest_s: float


@dataclass(frozen=True)
class CheckpointLaunch(Launch):
    """The figures of one job."""

    FORMAT = 1
    COMMAND = "python -m ckpt bench --json"
    ALIKE = ("machine", "ranks", "nodes", "nbytes", "tensors", "cold")

    nbytes: int
    """The bytes that each contestant saves and loads: the sum over all ranks."""
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
