"""What a launch has measured, what counts as bandwidth, and the JSON file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from collectives.bench.records import Record

RAW, GLOO = "raw mpi4py", "gloo"  # the peers, in the place of an algorithm's name
PEERS = {"mpi": RAW, "gloo": GLOO}  # as the command line names them


@dataclass(frozen=True)
class Measurement:
    """One contestant at one size. `nbytes`: of the whole array (see collectives/selection/selector.py)."""

    operation: str
    dtype: str
    nbytes: int
    algorithm: str  # of ours, or RAW or GLOO
    memory: str  # "private", or "node" for arrays in the memory that the node's ranks share; "in place": there, each part in its place
    seconds: float  # median over the rounds of the slowest rank's
    algbw: float  # bytes per second
    busbw: float
    rounds: int


@dataclass(frozen=True)
class Skipped:
    """A contestant that did not take part, and why."""

    operation: str
    dtype: str
    algorithm: str
    memory: str
    reason: str


@dataclass(frozen=True)
class Overhead:
    """Python's time of one call. `seconds`, `raw_seconds`: of a call in a tight loop, ours and raw mpi4py's, in the median."""

    operation: str
    nbytes: int
    arrays: str  # "numpy" or "torch"
    algorithm: str
    seconds: float
    raw_seconds: float


@dataclass(frozen=True)
class Launch(Record):
    """All that one job has measured, and on what."""

    FORMAT = 1
    COMMAND = "python -m collectives bench --json"

    machine: dict[str, Any]  # see table_cache.this_machine
    ranks: int
    nodes: int
    arrays: str
    results: Sequence[Measurement] = ()
    skipped: Sequence[Skipped] = ()
    overhead: Sequence[Overhead] = field(default=())


def bus_factor(operation: str, num_ranks: int) -> float:
    """What an optimal algorithm moves in and out of the busiest rank for each byte of the whole array."""
    n = num_ranks
    if operation in ("broadcast", "reduce"):
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (n - 1) / n
