"""The communication of a rank in a trace: its kept operations, the waits within them, and the arrows from the ranks waited for."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from collectives.diagnosis.record import KeptEntry
from mpitrain.job.record.trace.clocks import TAG, Line
from mpitrain.job.record.trace.events import COMMUNICATION, WAIT, RankEvents
from mpitrain.job.record.trace.meetings import FREES, LEAST_WAIT_S, Meetings, Met, key, role

_ISSUE_S = 1e-6  # the shown length of an issue, which the record does not have


class Operation(NamedTuple):
    """An operation of this rank that has ended. Times are seconds of rank 0's clock.

    entered: when the rank called it. begun: when a thread began to wait for it; the same as `entered` unless the operation was issued.
    waits: whether a thread has been in it from `begun` to `ended`.
    """

    words: str
    key: int
    role: int
    entered: float
    begun: float
    ended: float
    waits: bool
    is_issued: bool
    thread: int
    args: dict[str, str]

    def moved(self, line: Line) -> "Operation":
        """The same with corrected times."""
        return self._replace(entered=line(self.entered), begun=line(self.begun), ended=line(self.ended))


def operations(kept: Sequence[KeptEntry], me: int, clock: Callable[[float], float]) -> list[Operation]:
    """The kept operations that have ended. `me`: this rank's number in the job. `clock`: from `time.monotonic` to rank 0's clock."""
    return [_operation(each, me, clock) for each in kept if each.ended and not _is_of_clocks(each)]


def _is_of_clocks(entry: KeptEntry) -> bool:
    return entry.name in ("send", "recv") and entry.call[3] == TAG


def _operation(entry: KeptEntry, me: int, clock: Callable[[float], float]) -> Operation:
    log = entry.log
    name, elements, dtype, op, root = entry.call
    peer = -1 if root is None else log.ranks[root]
    args = {"communicator": str(log), "call": entry.operation.call}
    if entry.algorithm:
        args["algorithm"] = entry.algorithm
    if entry.operation.is_pair:
        sends = name[-4:] == "send"
        ends = (me, peer) if sends else (peer, me)
        words = f"{log.key}: {ends[0]} > {ends[1]}, {op}, {entry.sequence}"
        shown = f"{name} {'to' if sends else 'from'} rank {peer}"
    else:
        words = f"{log.key}, {entry.sequence}"
        shown = name
    size = f" {elements:,} x {dtype}" if dtype else ""
    has_waited = not entry.is_issued or entry.entered > 0
    # A receive that had ended before a thread would have waited has an end all the same, to which its message leads.
    begun = entry.ended if name == "irecv" and not has_waited else entry.begun
    return Operation(
        words=shown + size,
        key=key(words),
        role=role(name, elements=elements, is_root=peer == me),
        entered=clock(entry.entered or entry.begun),
        begun=clock(begun),
        ended=clock(entry.ended),
        waits=has_waited or name == "irecv",
        is_issued=entry.is_issued,
        thread=entry.thread,
        args=args,
    )


def meetings(operations: Sequence[Operation]) -> Meetings:
    """What the other ranks need to know of them."""
    return Meetings.of(
        [
            (each.key, each.role if each.waits else each.role & FREES, each.entered, each.begun, each.ended)
            for each in operations
        ]
    )


def draw(part: RankEvents, operations: Sequence[Operation], met: Met, rank: int) -> None:
    """Add the operations of `rank` to its part.

    A slice with a wait is split in the wait, until the last rank has entered the operation, and the transfer. An arrow comes from that
    rank to the transfer, and from each message to its receive.
    """
    names = {each.ident: f", thread {each.name}" for each in threading.enumerate()}
    names[threading.main_thread().ident] = ""
    last, heads = met.last[rank], []
    for at, each in enumerate(operations):
        row = COMMUNICATION + names.get(each.thread, ", ended threads")
        head = None
        if each.is_issued:
            head = part.slice(row, f"issue {each.words}", "issue", each.entered, each.entered + _ISSUE_S, each.args)
            if each.ended - each.entered > _ISSUE_S:
                part.in_flight(each.words, each.entered, each.ended)
        if each.waits:
            name = f"finish {each.words}" if each.is_issued else each.words
            target = part.slice(row, name, "communication", each.begun, each.ended, each.args)
            head = head or target
            entered = float(last.entered[at])
            if met.waited[rank][at] > LEAST_WAIT_S:
                part.slice(row, f"{WAIT} {last.rank[at]}", "wait", each.begun, entered)
                target = part.slice(row, "transfer", "communication", entered, each.ended)
            if met.has_arrow[rank][at]:
                target.begun = max(target.begun, part.tick(entered) + 1)  # after the arrow's begin
                target.arrows_in.append(met.arrow(rank, at))
        heads.append(head)
    for other, of_other in enumerate(met.last):
        for at in ((of_other.rank == rank) & met.has_arrow[other]).nonzero()[0]:
            head = heads[int(of_other.place[at])]
            assert head is not None, "an operation is issued, or a thread waits in it"
            head.arrows_out.append(met.arrow(other, int(at)))
