"""The contestants: calls of one operation by each algorithm and by each peer, all on the same memory.

The contestants on private memory share one set of arrays, whatever their library, so that all use the same memory pages (huge or not),
which are already touched. The arrays hold zeros, whose sums stay zeros.
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

IN_PLACE = "in place"  # an all_gather whose parts already lie in their places in the node's array
Key = tuple[str, str]  # algorithm (or a peer's name) and memory


class Entrants(NamedTuple):
    """The contestants that take part: the peers, "auto", and each algorithm that works, for each of `memories`.

    For node memory only "auto" and the algorithm made for it, "shared".
    """

    memories: Sequence[str] = ("private", "node")
    peers: Sequence[Peer] = ()
    arrays: str = "numpy"
    """The library of the arrays."""
    fixed_only: bool = False
    """Without "auto", and in node memory with all algorithms that work there."""
    without: Collection[str] = ()
    """The algorithms that do not take part."""


class TimedCall(NamedTuple):
    """A contestant (see kit/turns.py): a call, and the array that the call reads."""

    comm: Communicator
    call: Call
    read: np.ndarray

    def turn(self, round_: int) -> Seconds:
        # Otherwise the time would depend on the call of another contestant before, which leaves the array in some core's cache.
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
        as_numpy(array)[...] = 0  # allocates the pages
    return Arrays(whole, part, other)


def _in_node_memory(comm: Communicator, operation: str, private: Arrays, dtype: DType) -> Arrays:
    """Arrays like `private`, but the whole arrays in node memory: one for all ranks in an all-gather, else one each. OSError."""
    kind = dtype.numpy if isinstance(private.whole, np.ndarray) else private.whole.dtype
    make = comm.shared if operation == "all_gather" else comm.empty
    other = comm.empty(len(private.other), kind) if len(private.other) else private.other
    return _filled(make(len(private.whole), kind), private.part, other)
