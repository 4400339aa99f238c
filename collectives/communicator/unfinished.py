"""Checked mode: the arrays of unfinished operations, which no other operation may be given.

An operation is unfinished until the program knows its end by `wait()` or `done()`, or has let go of its Work and it has ended. How
fast it was is chance. Two operations may read one array at the same time. Where one of them writes, the result depends on which of
them comes first. Only arrays in host memory count: those on a device are used in the order of a stream.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from collectives.arrays.buffer import Buffer
from collectives.diagnosis.stacks import issued_here
from collectives.progress.work import Work


class _Use(NamedTuple):
    """The use of a stretch of memory by an operation that was called at `site`."""

    work: "weakref.ref[Work]"  # what carries it out holds it until it has ended
    begin: int
    end: int
    writes: bool
    operation: str
    site: str


_uses: list[_Use] = []  # of all communicators of this process
_lock = threading.Lock()


def refuse(operation: str, arrays: Sequence[Buffer]) -> None:
    """ValueError if `operation`, which is called here, writes what an unfinished one uses, or reads what one writes."""
    with _lock:
        _uses[:] = [use for use in _uses if (work := use.work()) is not None and not work.is_known]
        uses = _uses.copy()
    for b in arrays:
        if b.device is None and b.nbytes:
            begin, end = b.address, b.address + b.nbytes
            for use in uses:
                if begin < use.end and use.begin < end and (b.writes or use.writes):
                    raise ValueError(
                        f"{operation} at {issued_here()} {_verb(b.writes)} an array that {use.operation} at {use.site} still "
                        f"{_verb(use.writes)}; expected an array that no unfinished operation uses: call wait() of the first operation "
                        "before, or pass another array"
                    )


def note(work: Work, operation: str, arrays: Sequence[Buffer]) -> None:
    """`work`, which `operation` has given, uses `arrays` until it has ended."""
    site = str(issued_here())
    with _lock:
        _uses.extend(
            _Use(weakref.ref(work), b.address, b.address + b.nbytes, b.writes, operation, site)
            for b in arrays
            if b.device is None and b.nbytes
        )


def _verb(writes: bool) -> str:
    return "writes" if writes else "reads"
