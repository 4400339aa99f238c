"""What a launch has measured, what counts as bandwidth, and the JSON file."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

FORMAT = 1  # of the file
RAW, GLOO = "raw mpi4py", "gloo"  # the peers, in the place of an algorithm's name
PEERS = {"mpi": RAW, "gloo": GLOO}  # as the command line names them


@dataclass(frozen=True)
class Measurement:
    """One contestant at one size. `nbytes`: of the whole array (see collectives/selection.py)."""

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
class Launch:
    """All that one job has measured, and on what."""

    machine: dict[str, Any]  # see table_cache.this_machine
    ranks: int
    nodes: int
    arrays: str
    results: Sequence[Measurement] = ()
    skipped: Sequence[Skipped] = ()
    overhead: Sequence[Overhead] = field(default=())

    def write(self, path: str) -> None:
        """As a JSON object. OSError."""
        with open(path, "w") as file:
            json.dump({"format": FORMAT, **asdict(self)}, file, indent=1)
            file.write("\n")

    @classmethod
    def read(cls, path: str) -> "Launch":
        """What `write` has written. OSError; ValueError, which names the file, for anything else."""
        try:
            data = json.loads(Path(path).read_text())
            if data.pop("format") != FORMAT:
                raise ValueError(f"expected format {FORMAT}")
            rows: dict[str, Any] = {"results": Measurement, "skipped": Skipped, "overhead": Overhead}
            for name, kind in rows.items():
                data[name] = [_row(kind, row) for row in data[name]]
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no file of `python -m collectives bench --json`: {error}") from None


def _row(kind: Any, row: dict[str, Any]) -> Any:
    made = kind(**row)
    for name in (f.name for f in fields(kind)):
        value = getattr(made, name)
        if not isinstance(
            value, int | float if name in ("nbytes", "seconds", "raw_seconds", "algbw", "busbw", "rounds") else str
        ):
            raise ValueError(f"{name} {value!r}")
    return made


def bus_factor(operation: str, num_ranks: int) -> float:
    """What an optimal algorithm moves in and out of the busiest rank for each byte of the whole array."""
    n = num_ranks
    if operation in ("broadcast", "reduce"):
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (n - 1) / n
