"""The figures of a launch, the definition of bandwidth, and the JSON file."""

from collections.abc import Sequence
from dataclasses import dataclass

from collectives.bench.kit.launches import Launch

RAW, GLOO = "raw mpi4py", "gloo"  # the peers' names, used like the names of algorithms


@dataclass(frozen=True)
class Measurement:
    """One contestant at one size. `nbytes`: of the whole array (see collectives/selection/selector.py)."""

    operation: str
    dtype: str
    nbytes: int
    algorithm: str  # one of ours, or RAW or GLOO
    memory: str  # "private", "node" (arrays in node memory), or "in place" (node memory, with each part in its place)
    seconds: float  # median over the rounds of the slowest rank's time
    algbw: float  # bytes per second
    busbw: float
    rounds: int


@dataclass(frozen=True)
class Skipped:
    """A contestant that did not take part, and the reason."""

    operation: str
    dtype: str
    algorithm: str
    memory: str
    reason: str


@dataclass(frozen=True)
class CallOverhead:
    """Python's time per call. `seconds`, `raw_seconds`: the median time of a call in a tight loop, ours and raw mpi4py's."""

    operation: str
    nbytes: int
    arrays: str  # "numpy" or "torch"
    algorithm: str
    seconds: float
    raw_seconds: float


@dataclass(frozen=True)
class CollectivesLaunch(Launch):
    """The figures of one job. `arrays`: the library of the arrays."""

    FORMAT = 1
    COMMAND = "python -m collectives bench --json"
    ALIKE = ("machine", "ranks", "nodes", "arrays")

    arrays: str
    results: Sequence[Measurement] = ()
    skipped: Sequence[Skipped] = ()
    overhead: Sequence[CallOverhead] = ()


def bus_factor(operation: str, num_ranks: int) -> float:
    """The bytes that an optimal algorithm moves through the busiest rank for each byte of the whole array."""
    n = num_ranks
    if operation in ("broadcast", "reduce"):
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (n - 1) / n
