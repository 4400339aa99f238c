"""Checked mode: refuses an array that an unfinished operation still uses.

An operation is unfinished until the program has seen its end by `wait()` or `done()`, or has dropped its Work and the operation has
ended. An operation that has ended early by chance still counts. Two operations may read one array at the same time. If one of them
writes it, the result depends on their order. Only arrays in host memory count: a stream orders the operations on a device.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from collectives.arrays.buffer import Buffer
from collectives.diagnosis.stacks import issued_here
from collectives.progress.work import Work


class _Use(NamedTuple):
    """The use of an address range by an operation that was called at `site`."""

    work: "weakref.ref[Work]"  # the queue that carries out the operation holds its Work until the end
    begin: int
    end: int
    writes: bool
    operation: str
    site: str
    array: Buffer  # held: another array in its memory would be taken for it


_uses: list[_Use] = []  # of all communicators of this process
_lock = threading.Lock()


def refuse(operation: str, arrays: Sequence[Buffer]) -> None:
    """ValueError if `operation` writes an array that an unfinished operation uses, or reads an array that one writes."""
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
    """Note that `work`, which `operation` has returned, uses `arrays` until its end."""
    site = str(issued_here())
    with _lock:
        _uses.extend(
            _Use(weakref.ref(work), b.address, b.address + b.nbytes, b.writes, operation, site, b)
            for b in arrays
            if b.device is None and b.nbytes
        )


def _verb(writes: bool) -> str:
    return "writes" if writes else "reads"
