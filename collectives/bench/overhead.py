"""Python's time a call: our call of the MPI library's own algorithm beside raw mpi4py, in tight loops on a small array.

One call after a barrier would measure how ranks wake up. In a loop of many the ranks keep each other's pace, and what is left of the
difference is what our layer adds. "auto" stands beside it: it may take another algorithm, and be faster than raw.
"""

import time
from collections.abc import Sequence

import numpy as np

from collectives.arrays.dtypes import TABLE
from collectives.bench.contestants import contestants
from collectives.bench.results import RAW, Overhead
from collectives.communicator.communicator import Communicator

NBYTES = 1 << 10
LOOPS, CALLS = 40, 250


def overhead(
    comm: Communicator,
    operations: Sequence[str],
    arrays: Sequence[str] = ("numpy", "torch"),
    seconds_each: float = 2.0,
) -> list[Overhead]:
    """Time LOOPS loops of CALLS calls of each, in turn, on private float32 arrays of NBYTES. Collective.

    Fewer calls where these would take more than `seconds_each` for an operation on one library's arrays.
    """
    found = []
    for operation in operations:
        for library in arrays:
            count = max(1, NBYTES // (4 * comm.size)) * comm.size
            made = contestants(comm, operation, count, TABLE["float32"], memories=("private",), arrays=library)
            names = [RAW, "mpi", "auto"]
            seconds = np.empty((LOOPS, len(names)))
            calls = CALLS // 10  # in the loops before the first that counts
            for loop in range(-2, LOOPS):
                if loop == 0:
                    a_call = comm.broadcast_object(float(seconds[0].sum()))
                    calls = max(10, min(CALLS, int(seconds_each / (LOOPS * a_call))))
                for turn in range(len(names)):
                    i = (turn + loop) % len(names)
                    call = made.calls[names[i], "private"].call
                    comm.mpi.Barrier()
                    start = time.perf_counter()
                    for _ in range(calls):
                        call()
                    seconds[max(loop, 0), i] = (time.perf_counter() - start) / calls
            comm.all_reduce(seconds, "max")
            raw, *ours = np.median(seconds, axis=0).tolist()
            for name, median in zip(names[1:], ours, strict=True):
                found.append(Overhead(operation, count * 4, library, name, median, raw))
    return found
