"""Measures collectives: every algorithm, "auto", and the MPI library called through plain mpi4py, side by side.

All contestants take turns within one job, round by round, so that a disturbance of the machine hits all alike. Before each timed
call stands a barrier; a call takes as long as on its slowest rank; shown is the median over the rounds. As in NVIDIA's nccl-tests,
algbw is the whole array's bytes over the time, and busbw multiplies it by what an optimal algorithm has to move for each byte.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from collectives.communicator import Communicator
from collectives.dtypes import DType
from collectives.selection import ALGORITHMS
from collectives.units import show_bytes

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
WARM_UP = 3  # rounds that are not counted: the first calls set up connections and touch pages


@dataclass(frozen=True)
class Measurement:
    """One contestant at one size. `nbytes`: of the whole array, which for all_gather is `out`, for reduce_scatter `x`."""

    operation: str
    dtype: str
    nbytes: int
    algorithm: str
    memory: str  # "private", or "node" for arrays in the memory that the node's ranks share
    seconds: float
    algbw: float  # bytes per second
    busbw: float


def bus_factor(operation: str, num_ranks: int) -> float:
    """What an optimal algorithm moves in and out of a rank for each byte of the array."""
    n = num_ranks
    return {"all_reduce": 2 * (n - 1) / n, "all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n}.get(operation, 1.0)


def measure(
    comm: Communicator, operation: str, sizes: Sequence[int], dtype: DType, rounds: int = 30
) -> list[Measurement]:
    """Time all contestants at each size (bytes of the whole array, rounded to whole elements a rank). Collective."""
    results = []
    for size in sizes:
        count = max(1, size // (dtype.itemsize * comm.size)) * comm.size
        contestants = _contestants(comm, operation, count, dtype)
        calls = list(contestants.values())
        seconds = np.empty((rounds, len(contestants)))
        for round_ in range(-WARM_UP, rounds):
            for turn in range(len(calls)):
                i = (turn + round_) % len(calls)  # nobody always comes after the same neighbour's traces in the cache
                comm.mpi.Barrier()
                start = time.perf_counter()
                calls[i]()
                seconds[max(round_, 0), i] = time.perf_counter() - start
        comm.all_reduce(seconds, "max")
        nbytes = count * dtype.itemsize
        for (algorithm, memory), median in zip(contestants, np.median(seconds, axis=0).tolist(), strict=True):
            algbw = nbytes / median
            busbw = algbw * bus_factor(operation, comm.size)
            results.append(
                Measurement(operation, dtype.name, nbytes, algorithm, memory, median, algbw, busbw),
            )
    return results


def _contestants(
    comm: Communicator, operation: str, count: int, dtype: DType
) -> dict[tuple[str, str], Callable[[], Any]]:
    """(algorithm, memory) -> a call of it on arrays of `count` elements in all."""
    part = count // comm.size
    private = np.empty(count, dtype.numpy), np.empty(part, dtype.numpy)
    # An all-gather fills one array for the node; the others read the array of each peer.
    whole_of_node = comm.shared if operation == "all_gather" else comm.empty
    has_node = "shared" in ALGORITHMS[operation] and comm.num_nodes == 1
    node = (whole_of_node(count, dtype.numpy), np.empty(part, dtype.numpy)) if has_node else private
    for array in (*private, *node):
        array[...] = 0  # written, so that its pages exist; and zeros stay zeros however often they are added

    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    raw = _raw(comm, operation, *private, dtype)
    if raw is not None:
        calls["raw mpi4py", "private"] = raw
    for algorithm in ("auto", *ALGORITHMS[operation]):
        if algorithm != "shared":
            calls[algorithm, "private"] = _ours(comm, operation, algorithm, *private)
        elif has_node:
            calls[algorithm, "node"] = _ours(comm, operation, algorithm, *node)
    return calls


def _ours(comm: Communicator, operation: str, algorithm: str, whole: np.ndarray, part: np.ndarray) -> Callable[[], Any]:
    return {
        "all_reduce": lambda: comm.all_reduce(whole, algorithm=algorithm),
        "all_gather": lambda: comm.all_gather(whole, part, algorithm=algorithm),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole, algorithm=algorithm),
        "broadcast": lambda: comm.broadcast(whole, algorithm=algorithm),
    }[operation]


def _raw(
    comm: Communicator, operation: str, whole: np.ndarray, part: np.ndarray, dtype: DType
) -> Callable[[], Any] | None:
    """The same in plain mpi4py, as its user would write it; None where MPI has no such type to reduce."""
    from mpi4py import MPI

    mpi = comm.mpi
    if dtype.mpi is None and operation in ("all_reduce", "reduce_scatter"):
        return None
    # Halves are only moved here: as bytes.
    kind, units = (MPI.BYTE, dtype.itemsize) if dtype.mpi is None else (getattr(MPI, dtype.mpi), 1)
    num_whole, num_part = whole.size * units, part.size * units
    whole, part = whole.view(np.uint8), part.view(np.uint8)
    return {
        "all_reduce": lambda: mpi.Allreduce(MPI.IN_PLACE, [whole, num_whole, kind], MPI.SUM),
        "all_gather": lambda: mpi.Allgather([part, num_part, kind], [whole, num_part, kind]),
        "reduce_scatter": lambda: mpi.Reduce_scatter_block([whole, num_part, kind], [part, num_part, kind], MPI.SUM),
        "broadcast": lambda: mpi.Bcast([whole, num_whole, kind], 0),
    }[operation]


def table(comm: Communicator, results: Sequence[Measurement]) -> Table:
    """The results for a terminal; the fastest on private memory in bold."""
    first = results[0]
    title = f"{first.operation}, {first.dtype}, {comm.size} ranks on {comm.num_nodes} node{'s' * (comm.num_nodes > 1)}"
    shown = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("size", "algorithm", "memory"):
        shown.add_column(name, no_wrap=True)
    for name in ("time µs", "algbw GB/s", "busbw GB/s", "of raw"):
        shown.add_column(name, justify="right", no_wrap=True)
    for nbytes in dict.fromkeys(result.nbytes for result in results):
        group = [result for result in results if result.nbytes == nbytes]
        fastest = min(result.seconds for result in group if result.memory == "private")
        raw = next((result.seconds for result in group if result.algorithm == "raw mpi4py"), None)
        for i, result in enumerate(group):
            shown.add_row(
                show_bytes(nbytes) if i == 0 else "",
                result.algorithm,
                result.memory,
                f"{result.seconds * 1e6:.1f}",
                f"{result.algbw / 1e9:.3f}",
                f"{result.busbw / 1e9:.3f}",
                f"{raw / result.seconds:.2f}x" if raw else "",
                style="bold" if result.seconds == fastest else "",
            )
        shown.add_section()
    return shown


def write_json(path: str, comm: Communicator, results: Sequence[Measurement]) -> None:
    """One object: what it ran on, and the list of measurements (seconds, bytes per second)."""
    from collectives.transports.mpi import library_version

    machine = {"mpi": library_version(), "ranks": comm.size, "nodes": comm.num_nodes}
    with open(path, "w") as file:
        json.dump({**machine, "results": [asdict(result) for result in results]}, file, indent=1)
        file.write("\n")
