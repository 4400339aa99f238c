"""The mappings of node memory: those of one allocator (memory.py), and all of this process.

An array of one communicator may be an argument of a collective of another one, which must know that other ranks have it, too.
"""

import mmap
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from collectives.arrays.buffer import address_of


@dataclass(frozen=True)
class Segment:
    """One mapped file. `stride`: the number of bytes from one rank's array to the next; 0 if all ranks share one array."""

    number: int  # of its allocator, in order of allocation: the same on every rank
    # A weak reference: the arrays keep the mapping alive, and it is unmapped with its last array.
    mapping: weakref.ref[mmap.mmap]
    address: int
    length: int
    stride: int
    num_ranks: int  # that have it mapped


class Segments:
    """Segments that are found by address."""

    def __init__(self) -> None:
        # Addresses, and segments; replaced as one for other threads.
        self._sorted: tuple[list[int], list[Segment]] = ([], [])

    def add(self, new: Segment) -> None:
        """Add a segment, and drop those that were unmapped."""
        segments = sorted([*self, new], key=lambda segment: segment.address)
        self._sorted = [segment.address for segment in segments], segments

    def __iter__(self) -> Iterator[Segment]:
        """Those that are mapped."""
        return (segment for segment in self._sorted[1] if segment.mapping() is not None)

    def at(self, address: int, nbytes: int) -> Segment | None:
        """The segment with the `nbytes` bytes at `address`; None for private memory."""
        addresses, segments = self._sorted
        index = bisect_right(addresses, address) - 1
        if index >= 0:
            segment = segments[index]
            if address + nbytes <= segment.address + segment.length and segment.mapping() is not None:
                return segment
        return None


_of_process = Segments()
_listeners: list[weakref.WeakMethod[Callable[[], None]]] = []


def add(new: Segment) -> None:
    """Keep account of a new mapping of this process. Its listeners hear of it now, and before it is unmapped."""
    _of_process.add(new)
    _tell(_listeners)


def on_change(listener: Callable[[], None]) -> None:
    """Call `listener` whenever node memory is mapped in this process, and before it is unmapped.

    `listener` is a bound method; this list does not keep its object alive.
    """
    _listeners[:] = [other for other in _listeners if other() is not None]
    _listeners.append(weakref.WeakMethod(listener))


def watched(mapping: mmap.mmap) -> weakref.ref[mmap.mmap]:
    """The weak reference of a new segment, by which the listeners hear of its end."""
    return weakref.ref(mapping, partial(_tell, _listeners))


def is_shared(flat: np.ndarray) -> bool:
    """Whether other ranks of the node have the same array: it lies in an array of `shared`, of any communicator."""
    if not flat.size:
        return False
    segment = _of_process.at(address_of(flat), flat.nbytes)
    return segment is not None and segment.stride == 0 and segment.num_ranks > 1


def mapped_share_bytes() -> int:
    """This rank's share of all node memory that its process has mapped: of each mapping the Nth part, where N ranks have it."""
    return sum(segment.length // segment.num_ranks for segment in _of_process)


def _tell(listeners: Sequence[weakref.WeakMethod[Callable[[], None]]], *_: object) -> None:
    for reference in tuple(listeners):
        if (listener := reference()) is not None:
            listener()
