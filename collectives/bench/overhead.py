"""Python's time per call: our call of the MPI library's own algorithm and raw mpi4py's, in tight loops on a small array.

One call after a barrier would measure how the ranks wake up. In a loop of many calls the ranks stay synchronous, and the difference is
the time of our layer. "auto" is measured too: it may choose another algorithm, and be faster than raw mpi4py.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from collectives.arrays.dtypes import TABLE
from collectives.bench.calls import Entrants, timed_calls
from collectives.bench.kit.turns import Seconds, slowest, spread, take_turns, timed
from collectives.bench.peer import Call
from collectives.bench.plain_mpi import PlainMpi
from collectives.bench.results import RAW, CallOverhead
from collectives.communicator.communicator import Communicator

NBYTES = 1 << 10
LOOPS, CALLS = 40, 250
NAMES = ("mpi", "auto", RAW)


class _Loop(NamedTuple):
    """A contestant (see kit/turns.py): `calls` consecutive calls."""

    comm: Communicator
    call: Call
    calls: int

    def turn(self, round_: int) -> Seconds:
        def loop() -> None:
            for _ in range(self.calls):
                self.call()

        return {"call": timed(self.comm, loop) / self.calls}


def overhead(
    comm: Communicator, operations: Sequence[str], arrays: Sequence[str] = ("numpy", "torch"), seconds_each: float = 2.0
) -> list[CallOverhead]:
    """Time LOOPS loops of CALLS calls of each of NAMES, in turn, on private float32 arrays of NBYTES. Collective.

    A loop has fewer calls if an operation on one library's arrays would take more than `seconds_each`.
    """
    count = max(1, NBYTES // (4 * comm.size)) * comm.size
    found = []
    for operation in operations:
        for library in arrays:
            entrants = Entrants(("private",), [PlainMpi(comm, ExitStack())], library)
            made, _ = timed_calls(comm, operation, count, TABLE["float32"], entrants)
            calls = {name: made[name, "private"].call for name in NAMES}
            few = {name: _Loop(comm, call, CALLS // 10) for name, call in calls.items()}
            a_call = comm.broadcast_object(
                sum(float(taken[0]) for taken in take_turns(few, rounds=1, warm_up=1).values())
            )
            num = max(10, min(CALLS, int(seconds_each / (LOOPS * a_call))))
            series = take_turns({name: _Loop(comm, call, num) for name, call in calls.items()}, rounds=LOOPS)
            *ours, raw = (spread(seconds)[0] for seconds in slowest(comm, series).values())
            found += [
                CallOverhead(operation, count * 4, library, name, median, raw)
                for name, median in zip(NAMES, ours, strict=False)
            ]
    return found
