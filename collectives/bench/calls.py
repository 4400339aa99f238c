"""The contestants: calls of one operation by each algorithm and by each peer, all on the same memory.

The contestants on private memory share one set of arrays, whichever library sees them: the pages under an array (huge ones or not)
are then the same for all, and touched for all. The arrays hold zeros, which stay zeros however often they are added.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.buffer import as_numpy
from collectives.arrays.dtypes import DType
from collectives.bench.kit.turns import Seconds, make_each, timed
from collectives.bench.peer import Arrays, Call, Peer
from collectives.communicator.communicator import Communicator
from collectives.diagnosis import on_all_ranks
from collectives.selection.selector import NODE_OPERATIONS

IN_PLACE = "in place"  # of all_gather: each part stands in its place in the node's array already
Key = tuple[str, str]  # algorithm (or a peer's name) and memory


class Entrants(NamedTuple):
    """Which contestants take part: the peers, "auto", and each algorithm that can work in each of `memories`.

    In the node's memory only the algorithms that are made for it.
    """

    memories: Sequence[str] = ("private", "node")
    peers: Sequence[Peer] = ()
    arrays: str = "numpy"
    """The library of the arrays."""
    fixed_only: bool = False
    """No "auto", but in the node's memory too all algorithms that can work there."""
    without: Collection[str] = ()
    """These algorithms do not take part."""


class TimedCall(NamedTuple):
    """A contestant (see kit/turns.py): a call, and the array that it reads."""

    comm: Communicator
    call: Call
    read: np.ndarray

    def turn(self, round_: int) -> Seconds:
        # Else a call would pay for where the one before it, of another contestant, has left the array: in which core's cache, or read
        # by which peer.
        self.read[...] = 0
        return {"call": timed(self.comm, self.call)}


def timed_calls(
    comm: Communicator, operation: str, count: int, dtype: DType, entrants: Entrants
) -> tuple[dict[Key, TimedCall], dict[Key, str]]:
    """Calls on arrays of `count` elements in all, a multiple of the ranks; and the reasons of contestants that are skipped.

    Collective: the calls are the same on all ranks.
    """
    lengths = (count, count // comm.size, count if operation == "all_to_all" else 0)
    private = _filled(*(_empty(length, dtype, entrants.arrays) for length in lengths))
    peers = {(peer.name, "private"): partial(peer.call, operation, private) for peer in entrants.peers}
    made, skipped = make_each(peers)
    calls = {key: _timed(comm, operation, call, private) for key, call in made.items()}
    names = [name for name in comm.algorithms(operation, dtype, count * dtype.itemsize) if name not in entrants.without]
    auto = [] if entrants.fixed_only else ["auto"]

    def add(name: str, memory: str, arrays: Arrays) -> None:
        calls[name, memory] = _timed(comm, operation, _ours(comm, operation, name, arrays), arrays)

    if "private" in entrants.memories:
        for name in (*auto, *names):
            add(name, "private", private)
    if "node" in entrants.memories and "shared" in names and operation in NODE_OPERATIONS:
        try:
            on_node = _in_node_memory(comm, operation, private, dtype)
        except OSError as error:
            if not on_all_ranks(error):
                raise
            skipped["auto", "node"] = str(error)
            return calls, skipped
        for name in names if entrants.fixed_only else ("auto", "shared"):
            add(name, "node", on_node)
        if operation == "all_gather" and auto:
            add("auto", IN_PLACE, on_node._replace(part=on_node.whole.reshape(comm.size, -1)[comm.rank]))
    return calls, skipped


def _timed(comm: Communicator, operation: str, call: Call, arrays: Arrays) -> TimedCall:
    return TimedCall(comm, call, as_numpy(arrays.part if operation in ("all_gather", "gather") else arrays.whole))


def _ours(comm: Communicator, operation: str, algorithm: str, arrays: Arrays) -> Call:
    whole, part, other = arrays
    at_root = whole if comm.rank == 0 else None
    return {
        "all_reduce": lambda: comm.all_reduce(whole, algorithm=algorithm),
        "all_gather": lambda: comm.all_gather(whole, part, algorithm=algorithm),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole, algorithm=algorithm),
        "broadcast": lambda: comm.broadcast(whole, algorithm=algorithm),
        "reduce": lambda: comm.reduce(whole, algorithm=algorithm),
        "gather": lambda: comm.gather(at_root, part, algorithm=algorithm),
        "scatter": lambda: comm.scatter(part, at_root, algorithm=algorithm),
        "all_to_all": lambda: comm.all_to_all(other, whole, algorithm=algorithm),
    }[operation]


def _empty(count: int, dtype: DType, library: str) -> Any:
    if library == "numpy":
        return np.empty(count, dtype.numpy)
    import torch

    return torch.empty(count, dtype=getattr(torch, dtype.name))


def _filled(whole: Any, part: Any, other: Any) -> Arrays:
    for array in (whole, part, other):
        as_numpy(array)[...] = 0  # written, so that the pages exist
    return Arrays(whole, part, other)


def _in_node_memory(comm: Communicator, operation: str, private: Arrays, dtype: DType) -> Arrays:
    """The same with the whole arrays in the node's memory: one for all in an all-gather, else one a rank. OSError if it is full."""
    kind = dtype.numpy if isinstance(private.whole, np.ndarray) else private.whole.dtype
    make = comm.shared if operation == "all_gather" else comm.empty
    other = comm.empty(len(private.other), kind) if len(private.other) else private.other
    return _filled(make(len(private.whole), kind), private.part, other)
